"""What a round of a comparison leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from primus_odc.megatron.arm import StepOutcome
from primus_odc.megatron.minibatch import Minibatch

Lengths = list[list[list[int]]]
"""[rank][microbatch] lengths of the samples, in tokens; a padding microbatch has none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankStep:
    """One step of an arm as one rank saw it; milliseconds."""

    busy_ms: float
    """Processor time outside waits and transfers, without that of empty buckets: padding is no work."""
    microbatch_ms: list[float]
    """Forward and backward of each microbatch. On demand: wall time less what is nested. Stock: processor time.
    On GPUs predicted from ``ideal``, see :mod:`primus_odc.megatron.device_rounds`."""
    communication_ms: float
    """Transfers, settle and publish; in stock arms all of forward and backward that is not in ``microbatch_ms``, waiting included."""
    wait_ms: float | None
    """For a peer; None where it is not told from transfers."""
    optimizer_ms: float


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmStep:
    """One step of an arm over all ranks."""

    ms: float
    """From the first rank's start to the last rank's end."""
    outcome: StepOutcome
    ranks: list[RankStep]
    lengths: Lengths


@dataclass(kw_only=True, slots=True, frozen=True)
class IdealStep:
    """One step of ``ideal`` over all ranks."""

    ms: float
    """The longest forward and backward of any rank, and the longest optimizer step."""
    loss: float
    lengths: Lengths
    microbatch_ms: list[list[float]]
    """[rank][microbatch] forward and backward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """One minibatch in every arm; equal on all ranks."""

    arms: dict[str, ArmStep]
    ideal: IdealStep | None
    """None where the minibatch was skipped for having no target."""


def lengths_of(minibatch: Minibatch) -> Lengths:
    """What every rank runs of a minibatch."""
    plan = minibatch.plan
    rows = [[[plan.lengths[i] for i in bucket] for bucket in rank] for rank in plan.microbatches]
    return [row or [[]] * count for row, count in zip(rows, minibatch.counts, strict=True)]
