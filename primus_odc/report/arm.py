"""The record of one arm: everything measured in it, step by step, and its statistics.

Lists over steps cover all steps, warm-up included; :func:`measured_steps` says which of them enter the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field

from primus_odc.errors import DataError
from primus_odc.report.stats import median, quartiles


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmPhases:
    """Where the milliseconds of a step went, each ``[step][rank]``."""

    compute_ms: list[list[float]]
    """Forward and backward, everything nested in them taken off."""
    communication_ms: list[list[float]]
    """Moving bytes where nothing was computed meanwhile; waiting included where ``wait_ms`` is None."""
    wait_ms: list[list[float]] | None = None
    """Waiting for a peer; None where the arm cannot tell it from moving bytes."""
    optimizer_ms: list[list[float]] | None = None
    """Clipping and optimizer step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmResult:
    """Everything measured in one arm."""

    arm: str
    """nccl_pad, nccl_localsort, nccl_zero2, odc_pad or odc_nopad; unique within a comparison."""
    ms_per_step: list[float]
    """[step] wall time from the first rank's start to the last rank's end."""
    ms_per_step_median: float
    """Over the measured steps."""
    ms_per_step_spread: list[float]
    """``[q1, q3]`` over the measured steps."""
    loss: list[float | None]
    """[step] global loss; None at a skipped step."""
    grad_norm: list[float | None]
    """[step] global gradient norm before clipping; None at a skipped step."""
    tokens_per_s: float
    """Median over the measured steps of all ranks' tokens over the wall time; padding tokens are not counted."""
    microbatches: list[list[int]]
    """[step][rank] number of microbatches."""
    idle_fraction: list[float]
    """[rank] share of the measured steps' wall time in which the rank did not compute: waits and exposed transfers alike."""
    tokens: list[int] | None = None
    """[step] tokens of the minibatch over all ranks, padding not counted."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps whose minibatch had no target token."""
    phases: ArmPhases | None = None
    """Where the time went, where it was recorded."""
    microbatch_ms: list[list[list[float]]] | None = None
    """[step][rank][microbatch] compute milliseconds, what the ladder is split with."""

    def __post_init__(self) -> None:
        steps = len(self.ms_per_step)
        per_step: dict[str, Sized | None] = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "microbatches": self.microbatches,
            "tokens": self.tokens,
        }
        per_step["microbatch_ms"] = self.microbatch_ms
        if self.phases is not None:
            phases = self.phases
            per_step |= {"phases.compute_ms": phases.compute_ms, "phases.communication_ms": phases.communication_ms}
            per_step |= {"phases.wait_ms": phases.wait_ms, "phases.optimizer_ms": phases.optimizer_ms}
        problems = [
            f"{key} has {len(v)} steps, ms_per_step has {steps}" for key, v in per_step.items() if v is not None and len(v) != steps
        ]
        ranks = len(self.idle_fraction)
        problems += [
            f"microbatches[{s}] has {len(row)} ranks, idle_fraction {ranks}" for s, row in enumerate(self.microbatches) if len(row) != ranks
        ]
        problems += [f"ms_per_step[{s}] is {ms}, not positive" for s, ms in enumerate(self.ms_per_step) if ms <= 0]
        problems += [
            f"{key}[{s}] is null, but step {s} is not in skipped_steps"
            for key, values in (("loss", self.loss), ("grad_norm", self.grad_norm))
            for s, value in enumerate(values)
            if value is None and s not in self.skipped_steps
        ]
        if len(self.ms_per_step_spread) != 2:
            problems.append("ms_per_step_spread is not [q1, q3]")
        if problems:
            raise DataError(f"arm {self.arm}: {'; '.join(problems[:4])}")

    @property
    def world_size(self) -> int:
        return len(self.idle_fraction)

    @classmethod
    def measure(
        cls,
        *,
        arm: str,
        ms_per_step: Sequence[float],
        loss: Sequence[float | None],
        grad_norm: Sequence[float | None],
        tokens: Sequence[int],
        microbatches: Sequence[Sequence[int]],
        busy_ms: Sequence[Sequence[float]],
        warmup_steps: int,
        skipped_steps: Sequence[int] = (),
        phases: ArmPhases | None = None,
        microbatch_ms: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> ArmResult:
        """The record of an arm with its statistics worked out.

        Args:
            busy_ms: [step][rank] milliseconds the rank spent computing (forward, backward, optimizer); ``idle_fraction`` is what it lacks
            to the wall time.

        Raises:
            DataError: the lists do not fit each other, or no step is left to measure.
        """
        steps = measured_steps(len(ms_per_step), warmup_steps, skipped_steps)
        wall_ms = [ms_per_step[step] for step in steps]
        ranks = range(len(busy_ms[0]))
        return cls(
            arm=arm,
            ms_per_step=list(ms_per_step),
            ms_per_step_median=median(wall_ms),
            ms_per_step_spread=quartiles(wall_ms),
            loss=list(loss),
            grad_norm=list(grad_norm),
            tokens_per_s=median([1e3 * tokens[step] / ms_per_step[step] for step in steps]),
            microbatches=[list(row) for row in microbatches],
            idle_fraction=[1.0 - sum(busy_ms[step][rank] for step in steps) / sum(wall_ms) for rank in ranks],
            tokens=list(tokens),
            skipped_steps=list(skipped_steps),
            phases=phases,
            microbatch_ms=None if microbatch_ms is None else [[list(row) for row in table] for table in microbatch_ms],
        )


def measured_steps(steps: int, warmup_steps: int, skipped_steps: Sequence[int]) -> list[int]:
    """The steps that enter the statistics.

    Raises:
        DataError: none is left.
    """
    measured = [step for step in range(warmup_steps, steps) if step not in set(skipped_steps)]
    if not measured:
        raise DataError(
            f"no step left to measure: {steps} steps, {warmup_steps} of them warm-up, {len(skipped_steps)} skipped; run more steps"
        )
    return measured
