"""A tiny GPT trained on samples with LongAlign-like lengths, and the losses it must have: ``longalign_gpt.json``.

The losses come from no arm. ``python -m tests.golden.longalign_gpt`` trains the same initial weights in one process in fp64: the model of
``tests/reference_gpt.py``, one sample at a time, and the AdamW written out in ``tests/megatron/arm_cases.py``. Lengths are drawn from
``longalign-like/64`` and stored too, because numpy does not promise the same draws for ever; tokens follow from an integer recurrence.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from primus_odc.data.samples import Sample
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.model import build_gpt
from primus_odc.planning.lengths import named_distribution
from tests.megatron.arm_cases import PARAMS, Reference
from tests.megatron.gpt_cases import CPU, VOCAB

FILE = Path(__file__).with_suffix(".json")
DISTRIBUTION = "longalign-like/64"
MAX_TOKENS = 661  # of the longest sample, so that it fills a microbatch
STEPS = 6
BATCH = 6


@dataclass(kw_only=True, slots=True, frozen=True)
class Golden:
    """What is stored; all lists over steps."""

    lengths: list[list[int]]
    """[step][sample] tokens."""
    loss: list[float]
    """Loss sum over targets / targets, before the step's update."""
    grad_norm: list[float]
    """Global gradient norm."""

    @classmethod
    def read(cls) -> Golden:
        return cls(**json.loads(FILE.read_text(encoding="utf-8")))


def make_samples(lengths: list[int], step: int) -> list[Sample]:
    """The minibatch of a step: a rule with an exception now and then, so that there is something to learn; a fifth is prompt."""
    samples = []
    for number, length in enumerate(lengths):
        tokens = [(7 * step + number) % VOCAB]
        for i in range(1, length):
            tokens.append((5 * tokens[-1] + 3 + (i * i + number) % 7 // 5) % VOCAB)
        mask = np.arange(length) >= max(1, length // 5)
        samples.append(Sample(sample_id=f"{step}.{number}", tokens=np.array(tokens, dtype=np.int32), target_mask=mask))
    return samples


def compute() -> Golden:
    """Train in one process in fp64."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    distribution = named_distribution(DISTRIBUTION)
    assert distribution is not None
    lengths = distribution.sample(STEPS * BATCH, seed=33).reshape(STEPS, BATCH).tolist()
    model = build_gpt(PARAMS, VOCAB, device=CPU)
    reference = Reference({name: p.detach() for name, p in model.named_parameters()})
    rates = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    scheduler = build_scheduler(rates, PARAMS)
    losses, norms = [], []
    for step, row in enumerate(lengths):
        loss, gradients = reference.step(make_samples(row, step), rates.param_groups[0]["lr"])
        scheduler.step(1)
        losses.append(loss)
        norms.append(float(sum((g * g).sum() for g in gradients.values()) ** 0.5))
    return Golden(lengths=lengths, loss=losses, grad_norm=norms)


if __name__ == "__main__":
    FILE.write_text(json.dumps(asdict(compute()), indent=1) + "\n", encoding="utf-8")
