"""Minibatches to measure with: random tokens, every arm's plan.

The rank whose work decides how long a step takes is the same one in every arm, the first, because GPUs of one kind differ by a few per
cent: for equal counts the rank with the costliest microbatch, else the rank with the costliest sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from primus_odc.bench.job import ArmSpec
from primus_odc.data.packing import pack_microbatch
from primus_odc.data.samples import Sample
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.planning import CostModel, MinibatchPlan, plan_minibatch


@dataclass(kw_only=True, slots=True, frozen=True)
class BenchMinibatch:
    """One step's data under one plan, as one rank sees it."""

    plan: MinibatchPlan
    microbatches: tuple[Microbatch, ...]
    """This rank's own, on its device."""
    target_tokens: int
    """Over all ranks."""


def make_samples(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Sample]:
    """Random tokens; all but the first of a sample are targets."""
    generator = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        mask = np.ones(length, dtype=np.bool_)
        mask[0] = False
        tokens = generator.integers(0, vocab_size, length).astype(np.int32)
        samples.append(Sample(sample_id=f"s{number}", tokens=tokens, target_mask=mask))
    return samples


def heaviest_first(plan: MinibatchPlan, cost_model: CostModel) -> MinibatchPlan:
    """The same plan with the rank that decides first; the others keep their order."""
    costs = plan.microbatch_costs(cost_model)
    lockstep = plan.policy != "lb_mini"
    load = [float(rank.max() if lockstep else rank.sum()) if len(rank) else 0.0 for rank in costs]
    first = load.index(max(load))
    order = [first, *(rank for rank in range(plan.world_size) if rank != first)]
    return MinibatchPlan(
        policy=plan.policy,
        lengths=plan.lengths,
        max_tokens=plan.max_tokens,
        microbatches=tuple(plan.microbatches[rank] for rank in order),
    )


def make_minibatch(
    samples: Sequence[Sample], arm: ArmSpec, cost_model: CostModel, cap: int, world_size: int, rank: int, device: torch.device
) -> BenchMinibatch:
    """Plan ``samples`` for ``arm`` and bring this rank's part to its device."""
    plan = heaviest_first(plan_minibatch(arm.policy, [sample.tokens.size for sample in samples], world_size, cap, cost_model), cost_model)
    own = plan.microbatches[rank] or (((),) if arm.pads_empty_ranks else ())
    return BenchMinibatch(
        plan=plan,
        microbatches=tuple(Microbatch.of(pack_microbatch([samples[i] for i in bucket]), device) for bucket in own),
        target_tokens=sum(int(sample.target_mask.sum()) for sample in samples),
    )
