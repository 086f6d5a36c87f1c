"""From nccl_pad to the ideal, rung by rung, and what each rung is made of.

``nccl_pad -> odc_pad`` changes only the communication (the plan is the same), ``odc_pad -> odc_nopad`` only the plan (the communication
is the same), ``odc_nopad -> ideal`` takes all communication away. A difference in milliseconds does not say *why* it is there: on a CPU
the collective library may simply be slow, which on-demand communication should not get credit for. So the first two rungs are split with
the help of compute times alone.

Let ``C[r][m]`` be the forward and backward time of microbatch m on rank r with everything spent inside communication taken off, ``P``
such a table for the padded plan (LB-Micro) and ``B`` one for the balanced plan (LB-Mini), of one minibatch. Two schedules can be computed
from a table without running anything::

    lockstep(C) = sum over m of max over r of C[r][m]     every microbatch ends when the slowest rank's does (collectives)
    free(C)     = max over r of sum over m of C[r][m]     every rank runs through; one meeting at the end (on demand)

and free(C) <= lockstep(C) always. With t(arm) the measured step and o(arm) its optimizer step (0 where not recorded), per minibatch:

    waiting     = lockstep(P) - free(P)                   time that only exists because ranks meet at every microbatch; never negative
    plan        = free(P) - free(B)                       time that only exists because the padded plan balances worse or computes more
    overhead    = t(arm) - o(arm) - schedule(arm)         all else in a step: bytes moved, the library itself, what was not hidden.
                                                          schedule = lockstep(P) for nccl_pad, free(P) for odc_pad, free(B) for odc_nopad
    library     = (t(nccl_pad) - t(odc_pad)) - waiting    what the first rung gains beyond waiting: collectives costing more than on-demand
                                                          transfers, the collective library being slow
    plan_rest   = (t(odc_pad) - t(odc_nopad)) - plan      what the second rung gains beyond the plan: fewer microbatches, fewer transfers
    remaining   = t(odc_nopad) - t(ideal)                 what is left to win

``P`` is taken from odc_pad where it was recorded and from nccl_pad otherwise: collectives running beside the computation disturb its
times, and what that disturbance costs belongs to ``library``, not to ``waiting``. Collectives meet at every *layer*, so lockstep(P) is a
lower bound; waiting inside a microbatch also ends up in ``library``. Every negative value is a loss and is shown as one.

Over the steps, everything between two arms is a difference taken step by step, of which the median and the quartiles are shown, as
speed-ups are ratios taken step by step: so a part, the saving it belongs to and the speed-up of the same two arms cannot contradict each
other. The price: medians need not add up. Within a step the sums are exact (``nccl_pad - odc_pad = waiting + library`` and so on), over
the steps the parts' medians add up to that of their sum only nearly, and no more do they to the difference of the arms' median times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primus_odc.errors import DataError
from primus_odc.report.stats import median, quartiles

ComputeTable = Sequence[Sequence[float]]
"""[rank][microbatch] -> milliseconds of forward and backward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """Milliseconds that a step saves on the way from one arm to another, or a part of them; negative where time is added."""

    ms: float
    """Median over the steps of what it is in each."""
    quartiles: list[float]
    """``[q1, q3]`` over the steps."""

    def __post_init__(self) -> None:
        if len(self.quartiles) != 2:
            raise DataError("quartiles is not [q1, q3]")

    @classmethod
    def of(cls, values: Sequence[float]) -> Part:
        """Of one value per step."""
        return cls(ms=median(values), quartiles=quartiles(values))


@dataclass(kw_only=True, slots=True, frozen=True)
class LadderSplit:
    """What the rungs are made of; milliseconds per step."""

    lockstep_ms: float
    """The padded plan's compute with a meeting after every microbatch; median."""
    free_padded_ms: float
    """The padded plan's compute with one meeting at the end; median."""
    free_balanced_ms: float
    """The balanced plan's compute with one meeting at the end; median."""
    waiting: Part
    """Removed waiting: ``lockstep - free_padded``."""
    library: Part
    """Rest of the first rung: what the collective library cost beyond on-demand transfers."""
    plan: Part
    """Removed padding and imbalance: ``free_padded - free_balanced``."""
    plan_rest: Part
    """Rest of the second rung: transfers saved (or added) with the number of microbatches."""
    overhead_ms: dict[str, float]
    """Per arm: the step less the optimizer less the schedule computed from compute times alone; median."""
    padded_source: str
    """The arm whose compute times stand for the padded plan."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Ladder:
    """The rungs in milliseconds per step, and what they are made of where compute times were recorded."""

    nccl_pad_ms: float
    """Measured; median."""
    odc_pad_ms: float
    """Measured; median."""
    odc_nopad_ms: float
    """Measured; median."""
    communication: Part
    """First rung, ``nccl_pad - odc_pad``: the same plan, on demand."""
    plan: Part
    """Second rung, ``odc_pad - odc_nopad``: each rank its own count."""
    saved: Part
    """Both, ``nccl_pad - odc_nopad``."""
    ideal_ms: float | None = None
    """Measured in the same run without communication, median; None where it was not run."""
    remaining: Part | None = None
    """``odc_nopad - ideal``: what is left to win; None without ideal."""
    split: LadderSplit | None = None
    """None where an arm's times per microbatch were not recorded."""


def lockstep_ms(table: ComputeTable) -> float:
    """``sum over m of max over r``: all ranks meet after every microbatch.

    Raises:
        DataError: the ranks have different numbers of microbatches, which no collective schedule can run.
    """
    counts = [len(row) for row in table]
    if len(set(counts)) > 1:
        raise DataError(f"a lockstep schedule needs equal microbatch counts on all ranks, got {counts}; only on-demand arms may differ")
    return float(sum(max(column) for column in zip(*table, strict=True)))


def free_ms(table: ComputeTable) -> float:
    """``max over r of sum over m``: all ranks meet once, at the end; a rank without a microbatch takes no time."""
    return float(max((sum(row) for row in table), default=0.0))


def split_ladder(
    *,
    step_ms: dict[str, Sequence[float]],
    padded: Sequence[ComputeTable],
    balanced: Sequence[ComputeTable],
    optimizer_ms: dict[str, Sequence[float]],
    padded_source: str,
) -> LadderSplit:
    """The formulas of the module docstring over a number of steps.

    Args:
        step_ms: measured milliseconds per step of nccl_pad, odc_pad and odc_nopad, all of the same steps.
        padded: per step the compute table of the padded plan.
        balanced: per step the compute table of the balanced plan.
        optimizer_ms: per arm the optimizer's milliseconds per step; an arm that is missing counts as 0.
        padded_source: the arm ``padded`` was measured in.
    """
    lockstep = [lockstep_ms(table) for table in padded]
    free_padded = [free_ms(table) for table in padded]
    free_balanced = [free_ms(table) for table in balanced]
    waiting = differences(lockstep, free_padded)
    plan = differences(free_padded, free_balanced)
    schedules = {"nccl_pad": lockstep, "odc_pad": free_padded, "odc_nopad": free_balanced}
    overhead = {}
    for arm, schedule in schedules.items():
        optimizer = optimizer_ms.get(arm, [0.0] * len(schedule))
        overhead[arm] = median([t - o - s for t, o, s in zip(step_ms[arm], optimizer, schedule, strict=True)])
    return LadderSplit(
        lockstep_ms=median(lockstep),
        free_padded_ms=median(free_padded),
        free_balanced_ms=median(free_balanced),
        waiting=Part.of(waiting),
        library=Part.of(differences(differences(step_ms["nccl_pad"], step_ms["odc_pad"]), waiting)),
        plan=Part.of(plan),
        plan_rest=Part.of(differences(differences(step_ms["odc_pad"], step_ms["odc_nopad"]), plan)),
        overhead_ms=overhead,
        padded_source=padded_source,
    )


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """``a[s] - b[s]`` for every step."""
    return [x - y for x, y in zip(a, b, strict=True)]
