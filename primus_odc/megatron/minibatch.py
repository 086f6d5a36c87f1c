"""The minibatches one rank trains on, planned, packed and ready before the step that needs them.

Every rank holds the same dataset and draws the same minibatch, so the plan, and with it the number of target tokens over all ranks, is
known everywhere without communication. A rank packs its own microbatches only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from primus_odc.data.dataset import TokenDataset
from primus_odc.data.packing import pack_microbatch
from primus_odc.data.samples import Sample
from primus_odc.data.stream import MinibatchStream
from primus_odc.errors import PlanError
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.planning import CostModel, MinibatchPlan, PlanAhead, Policy
from primus_odc.planning.assignments import plan_assignment


@dataclass(kw_only=True, slots=True, frozen=True)
class Minibatch:
    """One optimizer step's data as one rank sees it."""

    step: int
    """Optimizer steps tried before it, skipped ones included; 0 is the first of the run."""
    plan: MinibatchPlan
    """Who runs what; the same on all ranks."""
    microbatches: tuple[Microbatch, ...]
    """This rank's own, in order; the costliest last. May be empty."""
    counts: tuple[int, ...]
    """Microbatches each rank runs, padding included."""
    target_tokens: int
    """Targets over all ranks: the loss sum is divided by it."""
    tokens: int
    """Tokens over all ranks, padding not counted."""
    sample_ids: tuple[str, ...]
    """In the order of the minibatch, all ranks."""
    digest: str
    """sha256 (hex) of sample ids, plan and number of targets: equal on two ranks exactly if they hold the same minibatch."""


def make_minibatch(
    step: int,
    samples: Sequence[Sample],
    *,
    policy: Policy,
    cost_model: CostModel,
    max_tokens: int,
    world_size: int,
    rank: int,
    device: torch.device,
    pad_empty_ranks: bool = False,
    assignment: int = 0,
) -> Minibatch:
    """Plan a minibatch and pack this rank's part of it.

    Args:
        step: see :attr:`Minibatch.step`.
        samples: of all ranks, in the same order on every rank.
        policy: of :func:`primus_odc.planning.plan_minibatch`.
        max_tokens: most tokens of one microbatch.
        pad_empty_ranks: a rank without work gets one padding microbatch, because it has to take part in collectives.
        assignment: other numbers give other plans, see :func:`primus_odc.planning.assignments.plan_assignment`.

    Raises:
        PlanError: it cannot be planned; the message names the samples.
    """
    ids = tuple(sample.sample_id for sample in samples)
    lengths = [sample.tokens.size for sample in samples]
    plan = plan_assignment(assignment, policy, lengths, world_size, max_tokens, cost_model, ids)
    targets = sum(int(sample.target_mask.sum()) for sample in samples)
    own = plan.microbatches[rank] or (((),) if pad_empty_ranks else ())
    packed = (pack_microbatch([samples[i] for i in bucket]) for bucket in own)
    return Minibatch(
        step=step,
        plan=plan,
        microbatches=tuple(Microbatch.of(arrays, device) for arrays in packed),
        counts=tuple(max(count, int(pad_empty_ranks)) for count in plan.counts),
        target_tokens=targets,
        tokens=sum(plan.lengths),
        sample_ids=ids,
        digest=hashlib.sha256("\0".join([plan.digest(), str(targets), *ids]).encode()).hexdigest(),
    )


Maker = Callable[[int, Sequence[Sample]], Minibatch]
"""(step, samples of all ranks) -> the minibatch, as one rank makes it."""


class MinibatchFactory:
    """The minibatches of consecutive steps, made ahead by a background thread; a context manager that closes at its end.

    The stream moves when a minibatch is taken, not when it is made ahead, so its state belongs to what was trained.
    """

    def __init__(
        self, dataset: TokenDataset, stream: MinibatchStream, make: Maker, *, first_step: int = 0, depth: int = 2, timeout_s: float = 600.0
    ) -> None:
        """
        Args:
            dataset: the same on all ranks.
            stream: stands at the minibatch of ``first_step``.
            make: :func:`make_minibatch` with all but its first two arguments.
            depth: minibatches kept ready.
            timeout_s: longest wait for one.
        """
        self._stream = stream
        self._batch_size = len(stream.minibatch_after(stream.consumed_samples))
        start = stream.consumed_samples

        def make_step(step: int) -> Minibatch:
            indices = stream.minibatch_after(start + (step - first_step) * self._batch_size)
            return make(step, [dataset[int(i)] for i in indices])

        self._ahead = PlanAhead(make_step, first_step, depth, timeout_s)

    def get(self, step: int) -> Minibatch:
        """The minibatch of ``step``; steps are taken one after the other.

        Raises:
            PlanError: it cannot be planned, or was not ready in time.
        """
        minibatch = self._ahead.get(step)
        self._stream.fast_forward(self._stream.consumed_samples + self._batch_size)
        return minibatch

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        self._ahead.close()

    def __enter__(self) -> MinibatchFactory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def evaluation_minibatches(dataset: TokenDataset, count: int, batch_size: int, make: Maker) -> list[Minibatch]:
    """The first ``count`` minibatches of ``batch_size`` samples, in the dataset's order, the same at every evaluation; fewer where the
    dataset ends before. ``make`` is :func:`make_minibatch` with all but its first two arguments.

    Raises:
        PlanError: none of the samples has a target.
    """
    stop = min(count * batch_size, len(dataset))
    chunks = [range(start, min(start + batch_size, stop)) for start in range(0, stop, batch_size)]
    minibatches = [make(number, [dataset[i] for i in chunk]) for number, chunk in enumerate(chunks)]
    if not any(minibatch.target_tokens for minibatch in minibatches):
        raise PlanError(f"none of the first {stop} validation samples has a target token; raise eval_iters or sft_validation_fraction")
    return minibatches
