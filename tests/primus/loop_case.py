"""A loop with Megatron's interface around Megatron's own schedule and gradient finalization, and a source of given microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.pipeline_parallel import schedules

from primus_odc.data.packing import pack_microbatch
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.primus.loop import LOSS
from primus_odc.primus.plan import StepPlan
from tests.cases.gpt_ranks import make_samples
from tests.megatron.gpt_cases import CPU, QWEN2, make_model

SAMPLES = make_samples((9, 4, 17, 6, 3, 12))
Assignment = Sequence[Sequence[Sequence[int]]]


class GivenSource:
    """Step k has ``assignments[k]``, [rank][microbatch] -> samples; an assignment of None has no target."""

    def __init__(self, assignments: Sequence[Assignment | None], rank: int, ranks: int, digest: str = "") -> None:
        self.assignments, self.rank, self.ranks, self.digest = assignments, rank, ranks, digest
        self.identity: dict[str, object] = {}
        self.begun: list[tuple[int, int]] = []
        self.closed = False
        self._left: Iterator[Sequence[int]] = iter(())

    def begin(self, step: int, consumed_samples: int) -> StepPlan:
        self.begun.append((step, consumed_samples))
        assignment = self.assignments[step]
        shown = assignment or [[[0]]] * self.ranks
        self._left = iter(shown[self.rank])
        return StepPlan(
            step=step,
            counts=tuple(len(buckets) for buckets in shown),
            tokens=1,
            target_tokens=None if assignment else 0,
            samples=len(SAMPLES),
            digest=self.digest or str(shown),
        )

    def close(self) -> None:
        self.closed = True

    def __next__(self) -> Microbatch:
        return Microbatch.of(pack_microbatch([SAMPLES[i] for i in next(self._left)]), CPU)


def make_training(args: SimpleNamespace) -> Any:
    """A module with what the loop replaces in ``megatron.training.training``."""
    training: Any = ModuleType("training")
    training.torch_FSDP = TorchFullyShardedDataParallel
    training.get_args = lambda: args
    training.train_step = _train_step
    training.dummy_train_step = lambda iterator: None
    return training


def wrap(training: Any) -> Any:
    """The model, wrapped as Megatron does it."""
    model = make_model(QWEN2)
    model.config.calculate_per_token_loss = True
    model.config.transformer_impl = "local"  # the wrapper asks, to decide what becomes a unit
    model.config.finalize_model_grads_func = finalize_model_grads
    return training.torch_FSDP(config=model.config, ddp_config=DistributedDataParallelConfig(), module=model, disable_bucketing=False)


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    microbatch = next(iterator)
    tokens = torch.tensor(microbatch.num_targets, dtype=torch.int)
    return model(microbatch), lambda loss: (loss.clone(), tokens, {LOSS: torch.stack([loss.detach(), tokens.float()])})


def _train_step(
    forward_step_func: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, iteration: Any = None
) -> Any:
    """Megatron's, without what does not concern us: the whole of its contract with wrapper, schedule and report."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = passes(
        forward_step_func=forward_step_func,
        data_iterator=iterator,
        model=model,
        num_microbatches=99,
        seq_length=QWEN2["seq_length"],
        micro_batch_size=1,
        forward_only=False,
        force_all_reduce=False,
    )
    total = torch.stack([report[LOSS] for report in reports]).sum(dim=0)
    torch.distributed.all_reduce(total)
    return {LOSS: total[0] / total[1]}, 0, False, False, 0, 1.0, None, 0


PASSES = schedules.forward_backward_no_pipelining
