"""What a result file says: statistics of every arm at every point, made from the single steps.

Steps of several entries of one run that have the same settings count together. A step lasts as long as on the rank where it lasts longest.
Ratios of arms are taken minibatch by minibatch before anything is aggregated.

*Idle* is the part of a step in which a rank does not compute. What it computes is not measured in the arms themselves, where transfers and
waiting are mixed with it, but predicted from ``ideal``, which has neither: per rank a fit of its microbatches' times to their tokens, the
squares of their samples and a constant. How well the fit meets the times it is made of stands beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from primus_odc.report.fit import fit_times, predict_ms
from primus_odc.report.stats import median, quartiles

BASELINE, IDEAL = "nccl_pad", "ideal"
Step = dict[str, Any]
SETTINGS = (
    "shape",
    "lengths",
    "layers",
    "device",
    "world_size",
    "transport",
    "ranks_per_node",
    "sequence",
    "seed",
    "optimizer",
    "clip_grad",
    "fixed_tokens",
    "share_model",
    "deterministic",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Spread:
    """A median with what surrounds it."""

    median: float
    q1: float
    q3: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no value."""
        if not values:
            return None
        q1, q3 = quartiles(values)
        return cls(median=median(values), q1=q1, q3=q3, lowest=min(values), highest=max(values))


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmSummary:
    """One row of a table; None where there is nothing to say."""

    arm: str
    steps: int
    ms: Spread
    step_ms: dict[tuple[int, int], float]
    """(entry, minibatch) -> milliseconds of the step."""
    speedup: Spread | None
    """``nccl_pad`` / arm."""
    times_ideal: Spread | None
    """arm / ``ideal``; what is possible at a minibatch is reached to its inverse."""
    idle: tuple[float, ...]
    """[rank] median part of the step; empty without ``ideal``."""
    exposed_settle_ms: Spread | None
    """On the rank whose last backward ends last: until its gradients are complete."""
    exposed_settle_share: float | None
    """Its median part of the step."""
    all_settled_ms: float | None
    """From the same moment until the gradients of all ranks are complete; median."""
    hidden_share: float | None
    """Part of the gradient bytes that rank had moved when its last backward ended; median."""
    clip_ms: float
    optimizer_ms: float
    host_wait_ms: tuple[float, ...]
    """[rank] median host time in the engine's waits; empty without an engine."""
    host_ahead_ms: tuple[float, float] | None
    """On the rank that finishes last, the least of any microbatch at the end of its forward, and of its backward; medians."""
    peak_gib: float
    """Of the rank that needs most: what stays between steps, the engine's formula, and the most that was allocated on top."""
    engine_gib: float
    engine_seen_gib: float
    loss_difference: float | None
    """Largest relative difference to ``nccl_pad``; None for ``ideal``, whose weights are others."""
    norm_difference: float | None
    """The same of the gradient norm."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PointSummary:
    """All arms at one point of one run."""

    settings: dict[str, Any]
    samples_per_rank: int
    cap: int
    minibatches: int
    tokens: int
    """Median over minibatches, all ranks together."""
    fit_error: float | None
    """Median relative difference between ideal's microbatch times and their fit."""
    arms: list[ArmSummary]


def summarise(entries: Iterable[dict[str, Any]]) -> list[PointSummary]:
    """The points of one run's ``train`` entries, in the order of settings, cap and samples a rank."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["kind"] == "train":
            settings = tuple((key, entry.get(key)) for key in SETTINGS)
            groups[(settings, entry["cap"], entry["samples_per_rank"])].append(entry)
    ordered = sorted(groups, key=lambda key: (str(key[0]), key[1], key[2]))
    return [_point(dict(key[0]), key[1], key[2], groups[key]) for key in ordered]


def _point(settings: dict[str, Any], cap: int, samples_per_rank: int, entries: list[dict[str, Any]]) -> PointSummary:
    steps: dict[str, dict[tuple[int, int], Step]] = defaultdict(dict)
    memory: dict[str, list[list[dict[str, int]]]] = defaultdict(list)
    for number, entry in enumerate(entries):
        for arm, measured in entry["steps"].items():
            steps[arm] |= {(number, step["minibatch"]): step for step in measured}
        for arm, ranks in entry["memory"].items():
            memory[arm].append(ranks)
    fits, fit_error = _fit(list(steps.get(IDEAL, {}).values()))
    tokens = [_tokens(step) for step in {key: step for arm in steps.values() for key, step in arm.items()}.values()]
    return PointSummary(
        settings=settings,
        samples_per_rank=samples_per_rank,
        cap=cap,
        minibatches=len(tokens),
        tokens=round(median(tokens)) if tokens else 0,
        fit_error=fit_error,
        arms=[_arm(arm, measured, steps, fits, memory[arm]) for arm, measured in steps.items() if measured],
    )


def _arm(
    arm: str,
    measured: dict[tuple[int, int], Step],
    steps: dict[str, dict[tuple[int, int], Step]],
    fits: list[npt.NDArray[np.float64]],
    memory: list[list[dict[str, int]]],
) -> ArmSummary:
    times = {key: step_ms(step) for key, step in measured.items()}
    baseline = {key: step_ms(step) for key, step in steps.get(BASELINE, {}).items()}
    ideal = {key: step_ms(step) for key, step in steps.get(IDEAL, {}).items()}
    rows = [(step, last_rank(step)) for step in measured.values()]
    on_demand = arm.startswith("odc")
    exposed = [rank["settled_at"] - rank["computed_at"] for _, rank in rows] if on_demand else []
    ms = Spread.of(list(times.values()))
    assert ms is not None
    ranks = [rank for entry in memory for rank in entry]
    hidden = [
        # Files of an older version have what was reduced instead: the same, except in ``owner`` mode.
        rank["bytes_hidden"] / settled
        for _, rank in rows
        if rank["bytes_hidden"] is not None and (settled := rank.get("bytes_settled") or rank["bytes_reduced"])
    ]
    # Files of an older version do not have it; a rank without microbatches has nothing to be ahead of.
    ahead = [[min(moments) for moments in zip(*rank["host_ahead_ms"], strict=True)] for _, rank in rows if rank.get("host_ahead_ms")]
    waits = [[rank["host_wait_ms"] for rank in step["ranks"]] for step in measured.values()] if on_demand else []
    return ArmSummary(
        arm=arm,
        steps=len(times),
        ms=ms,
        step_ms=times,
        speedup=None if arm == BASELINE else Spread.of([baseline[key] / times[key] for key in times if key in baseline]),
        times_ideal=None if arm == IDEAL else Spread.of([times[key] / ideal[key] for key in times if key in ideal]),
        idle=_idle(list(measured.values()), fits),
        exposed_settle_ms=Spread.of(exposed),
        exposed_settle_share=median([gap / step_ms(step) for gap, (step, _) in zip(exposed, rows, strict=True)]) if exposed else None,
        all_settled_ms=(
            median([max(r["settled_at"] for r in step["ranks"]) - rank["computed_at"] for step, rank in rows]) if on_demand else None
        ),
        hidden_share=median(hidden) if hidden else None,
        clip_ms=median([rank["clipped_at"] - rank["settled_at"] for _, rank in rows]),
        optimizer_ms=median([rank["updated_at"] - rank["clipped_at"] for _, rank in rows]),
        host_wait_ms=tuple(median(column) for column in zip(*waits, strict=True)),
        host_ahead_ms=(median([forward for forward, _ in ahead]), median([backward for _, backward in ahead])) if ahead else None,
        peak_gib=max((rank["resting"] + rank["above_resting"] for rank in ranks), default=0) / 2**30,
        engine_gib=max((rank["engine"] for rank in ranks), default=0) / 2**30,
        engine_seen_gib=max((rank["engine_seen_by_device"] for rank in ranks), default=0) / 2**30,
        loss_difference=None if arm in (BASELINE, IDEAL) else _difference(loss, measured, steps.get(BASELINE, {})),
        norm_difference=None if arm in (BASELINE, IDEAL) else _difference(grad_norm, measured, steps.get(BASELINE, {})),
    )


def step_ms(step: Step) -> float:
    """Milliseconds of a step on the rank where it lasted longest."""
    return float(max(rank["ms"] for rank in step["ranks"]))


def last_rank(step: Step) -> dict[str, Any]:
    """The rank whose last backward ended last."""
    rank: dict[str, Any] = max(step["ranks"], key=lambda rank: rank["computed_at"])
    return rank


def _tokens(step: Step) -> int:
    return sum(length for rank in step["microbatches"] for bucket in rank for length in bucket)


def _fit(steps: list[Step]) -> tuple[list[npt.NDArray[np.float64]], float | None]:
    """[rank] coefficients of a microbatch's time, and the median relative error; nothing where ``ideal`` was not run."""
    if not steps:
        return [], None
    fits, errors = [], []
    for rank in range(len(steps[0]["ranks"])):
        pairs = [
            (bucket, ms)
            for step in steps
            for bucket, ms in zip(step["microbatches"][rank], step["ranks"][rank]["microbatch_ms"], strict=True)
        ]
        if not pairs:
            return [], None
        solution, mine = fit_times(pairs)
        fits.append(solution)
        errors += mine
    return fits, median(errors)


def _idle(steps: list[Step], fits: list[npt.NDArray[np.float64]]) -> tuple[float, ...]:
    """[rank] the median part of a step in which it neither computes nor updates."""
    if not fits:
        return ()
    idle = []
    for rank, fit in enumerate(fits):
        parts = []
        for step in steps:
            mine = step["ranks"][rank]
            # A microbatch of padding is no work.
            busy = sum(predict_ms(fit, bucket) for bucket in step["microbatches"][rank] if bucket)
            busy += mine["updated_at"] - mine["clipped_at"]
            parts.append(max(0.0, 1.0 - busy / step_ms(step)))
        idle.append(median(parts))
    return tuple(idle)


def loss(step: Step) -> float:
    """Of all ranks, per target token."""
    return sum(float(rank["loss_sum"]) for rank in step["ranks"]) / float(step["target_tokens"])


def grad_norm(step: Step) -> float:
    """Of the gradients of all ranks, before clipping."""
    return float(step["ranks"][0]["grad_norm"])


def _difference(
    value: Callable[[Step], float], measured: dict[tuple[int, int], Step], baseline: dict[tuple[int, int], Step]
) -> float | None:
    """The largest relative one over the minibatches that both have."""
    differences = [abs(value(step) / value(baseline[key]) - 1.0) for key, step in measured.items() if key in baseline]
    return max(differences) if differences else None
