"""Pretraining in Primus: Megatron's own datasets, model and forward step, with the plan of the arm.

All samples have ``seq_length`` tokens, so the plan spreads them evenly, and a microbatch is as many of them as
``odc.max_tokens_per_microbatch`` holds (by default ``micro_batch_size``). Samples are taken in the dataset's order, which Megatron has
shuffled already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from primus_odc.errors import DataError
from primus_odc.planning import CostModel, Policy, plan_minibatch
from primus_odc.primus.evaluation import EvaluationCycle
from primus_odc.primus.plan import StepPlan


class PretrainSource:
    """The minibatches of a run, of samples of one length; see :class:`primus_odc.primus.plan.MinibatchSource`."""

    def __init__(self, dataset: Any, args: Any, *, policy: Policy, cost_model: CostModel, max_tokens: int) -> None:
        """``args`` are Megatron's.

        Raises:
            DataError: a step has more samples than the dataset.
        """
        if args.global_batch_size > len(dataset):
            raise DataError(
                f"global_batch_size: {args.global_batch_size} is more than the {len(dataset)} samples of the training dataset, so every "
                f"step would hold some of them more than once; set it to at most {len(dataset)}, or give more data (data_path)"
            )
        self._dataset = dataset
        self._args = args
        self._planning: dict[str, Any] = {"max_tokens": max_tokens, "cost_model": cost_model}
        self._policy = policy
        self._left: Iterator[Any] = iter(())
        described = getattr(dataset, "unique_description_hash", type(dataset).__name__)
        self.identity = {"source": str(args.data_path or "mock"), "tokenizer": str(args.tokenizer_type), "fingerprint": str(described)}

    def begin(self, step: int, consumed_samples: int) -> StepPlan:
        batch, length, world = self._args.global_batch_size, self._args.seq_length, dist.get_world_size()
        plan = plan_minibatch(self._policy, [length] * batch, world, **self._planning)
        indices = [(consumed_samples + i) % len(self._dataset) for i in range(batch)]
        self._left = (self._microbatch([indices[i] for i in bucket], indices[0]) for bucket in plan.microbatches[dist.get_rank()])
        return StepPlan(
            step=step,
            counts=plan.counts,
            tokens=batch * length,
            target_tokens=None,
            samples=batch,
            digest=hashlib.sha256(f"{plan.digest()} {self.identity} {indices}".encode()).hexdigest(),
        )

    def close(self) -> None:
        """Nothing runs in the background."""

    def __iter__(self) -> PretrainSource:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return next(self._left)

    def _microbatch(self, indices: Sequence[int], any_index: int) -> dict[str, torch.Tensor]:
        if indices:
            return collate(self._dataset, indices)
        padding = collate(self._dataset, [any_index])
        return {**padding, "loss_mask": torch.zeros_like(padding["loss_mask"])}


def collate(dataset: Any, indices: Sequence[int]) -> dict[str, torch.Tensor]:
    """Samples of a Megatron dataset as one batch: each entry [samples, ...]."""
    batch: dict[str, torch.Tensor] = default_collate([dataset[i] for i in indices])
    return batch


def datasets_provider(
    args_of: Callable[[], Any],
    native: Callable[..., Sequence[Any]],
    use: Callable[[PretrainSource, Any], None],
    *,
    policy: Policy,
    cost_model: CostModel,
    max_tokens: int,
) -> Callable[..., tuple[Any, Any, None]]:
    """Megatron's provider of datasets, each behind an iterator of ours; ``use`` is told the source and its dataset."""

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, None]:
        args = args_of()
        train, valid, _ = native(num_samples)
        if train is None or len(train) == 0:
            raise DataError("the training dataset is empty: set data_path, or mock_data: true")
        source = PretrainSource(train, args, policy=policy, cost_model=cost_model, max_tokens=max_tokens)
        use(source, train)
        if not args.eval_iters or valid is None or len(valid) == 0:
            return source, None, None
        evaluated = args.eval_iters * args.global_batch_size
        cycle = EvaluationCycle(
            lambda indices: collate(valid, indices),
            len(valid),
            evaluated,
            args.micro_batch_size,
            dist.get_rank(),
            dist.get_world_size(),
        )
        return source, cycle, None

    provide.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron: every rank has the data
    return provide
