"""Runs in Primus as a table, beside what ``bench train`` measured on the same minibatches.

A step of Primus' is the wall time of Megatron's ``train_step`` on rank 0, from a device without work to a device without work: it ends with
the loss on the host, behind the optimizer. A step of ``bench train`` is the time between two marks on the device, of the slower rank.
Ratios are taken minibatch by minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_odc.bench.markdown import table
from primus_odc.bench.results import load
from primus_odc.bench.summary import BASELINE, Spread, step_ms
from primus_odc.errors import DataError
from primus_odc.report.logs import StepLog, StepRecord
from primus_odc.report.stats import median

CLOSE = 0.03
"""Speed-ups that differ by less count as the same."""

_NOTE = """\
ms: median over minibatches. Speed-up: nccl_pad / arm, minibatch by minibatch: median [lowest..highest]. Apart: the speed-up in Primus
divided by that of bench train, minibatch by minibatch, likewise. Loss, norm: largest relative difference to nccl_pad's.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Point:
    """What was run; equal names are equal keys of an entry of ``bench train``."""

    shape: str
    layers: int | None
    lengths: str
    device: str
    world_size: int
    samples_per_rank: int
    cap: int
    minibatches: int
    seed: int
    fixed_tokens: float


def render_beside(logs: Mapping[str, StepLog], point: Point, bench: Path | None) -> str:
    """Markdown: every arm of ``logs``, and where ``bench`` names a result file the arms it has at the same point.

    Raises:
        DataError: ``bench`` is not such a file, or holds other microbatches for an arm.
    """
    steps = {arm: log.steps[-point.minibatches :] for arm, log in logs.items()}
    found = _entry(load(bench), point) if bench is not None else None
    for arm, own in steps.items():
        _require_same(arm, own, found["steps"].get(arm, []) if found is not None else [])
    names = ["arm", "ms", "speed-up", "loss", "norm", "ms, bench train", "speed-up, bench train", "apart"]
    rows, apart = [], {}
    for arm, own in steps.items():
        ours = _speedups([step.ms for step in own], steps.get(BASELINE), lambda step: step.ms)
        theirs = _bench_ms(found, arm)
        others = _speedups(theirs, _bench_ms(found, BASELINE), float)
        if ours and others:
            apart[arm] = [a / b for a, b in zip(ours, others, strict=True)]
        rows.append(
            [
                arm,
                f"{median([step.ms for step in own]):.1f}",
                _told(ours),
                _difference(own, steps.get(BASELINE), "loss"),
                _difference(own, steps.get(BASELINE), "grad_norm"),
                f"{median(theirs):.1f}" if theirs else "-",
                _told(others),
                _told(apart.get(arm, [])),
            ]
        )
    told = ", ".join(f"{name.replace('_', ' ')} {getattr(point, name)}" for name in Point.__slots__ if getattr(point, name) is not None)
    parts = ["# In Primus", "", told, "", _NOTE, table(names, rows), ""]
    if bench is not None and found is None:
        parts += [f"{bench.name} has no entry of these settings.", ""]
    for arm, ratios in apart.items():
        if arm != BASELINE:
            verdict = "within" if abs(median(ratios) - 1.0) <= CLOSE else "not within"
            parts.append(f"* {arm}: {verdict} {CLOSE:.0%} of bench train's speed-up (median over minibatches: {median(ratios):.3f})")
    parts += ["", "Milliseconds of every minibatch, in Primus and in bench train:", ""]
    columns = [f"{place} {arm}" for arm in steps for place in (("", "bench") if _bench_ms(found, arm) else ("",))]
    series = [values for arm, own in steps.items() for values in ([step.ms for step in own], _bench_ms(found, arm)) if values]
    lines = [[str(number), *(f"{value:.0f}" for value in line)] for number, line in enumerate(zip(*series, strict=True))]
    parts += [table(["minibatch", *(column.strip() for column in columns)], lines)]
    return "\n".join(parts).rstrip() + "\n"


def _entry(content: dict[str, Any], point: Point) -> dict[str, Any] | None:
    """The last entry of the file with these settings."""
    entries = [entry for run in content["runs"] for entry in run["entries"] if entry["kind"] == "train"]
    same = [entry for entry in entries if all(entry[name] == getattr(point, name) for name in Point.__slots__)]
    return same[-1] if same else None


def _require_same(arm: str, own: Sequence[StepRecord], measured: Sequence[dict[str, Any]]) -> None:
    """Which rank has which microbatches is not compared: ``bench train`` gives most work to rank 0."""
    for record, step in zip(own, measured, strict=False):
        tokens = sum(length for rank in step["microbatches"] for bucket in rank for length in bucket)
        counts = sorted(len(rank) for rank in step["microbatches"])
        if (tokens, counts) != (record.tokens, sorted(record.microbatches)):
            raise DataError(
                f"{arm}, minibatch {step['minibatch']}: {record.tokens} tokens in {record.microbatches} microbatches in Primus, "
                f"{tokens} in {counts} in bench train; both need the same version of primus_odc and numpy"
            )


def _bench_ms(entry: dict[str, Any] | None, arm: str) -> list[float]:
    """Milliseconds of every minibatch; empty where the arm was not run, or not to its end."""
    measured = entry["steps"].get(arm, []) if entry is not None else []
    return [step_ms(step) for step in measured] if entry is not None and len(measured) == entry["minibatches"] else []


def _speedups(own: Sequence[float], baseline: Sequence[Any] | None, ms: Any) -> list[float]:
    return [ms(step) / mine for mine, step in zip(own, baseline, strict=True)] if own and baseline else []


def _told(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.3f} [{spread.lowest:.3f}..{spread.highest:.3f}]" if spread is not None else "-"


def _difference(own: Sequence[StepRecord], baseline: Sequence[StepRecord] | None, name: str) -> str:
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(own, baseline or [], strict=False)]
    differences = [abs(a / b - 1.0) for a, b in pairs if a is not None and b]
    return f"{max(differences):.1e}" if differences else "-"
