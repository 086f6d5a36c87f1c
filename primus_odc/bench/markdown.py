"""A result file as Markdown: for every commit and machine the table of its training points and that of its transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from primus_odc.bench.summary import BASELINE, ArmSummary, PointSummary, Spread, summarise
from primus_odc.report.stats import median, quartiles
from primus_odc.report.wording import NOISE

_LEGEND = """\
ms: median over minibatches of the step on the rank where it lasts longest (quartiles). Speed-up: nccl_pad / arm, minibatch by minibatch:
median (quartiles) [lowest..highest]. x ideal: arm / ideal, likewise; share: the part of what is possible, ideal / arm. Idle: part of a
step in which a rank does not compute, per rank. Exposed settle: on the rank that finishes last, from the end of its last backward until its
gradients are complete. All settled: from the same moment until every rank has its gradients. Hidden: part of that rank's gradient bytes
that was moved before. Host ahead: there, from when the host had started all of a forward or backward until the device was through with it
(the least of any microbatch); near zero the device waits for its host. Peak: most memory of any rank, models of other arms left out;
engine: what it adds by its formula (and as the device saw it when it was attached).
"""


def render(content: dict[str, Any]) -> str:
    """Markdown of a whole file (:mod:`primus_odc.bench.results`)."""
    parts = ["# Benchmarks", ""]
    for run in content["runs"]:
        parts += [f"## {describe_machine(run['machine'])}, commit {run['commit'] or 'unknown'}", ""]
        parts += [", ".join(f"{name} {version}" for name, version in run["versions"].items()), ""]
        points = summarise(run["entries"])
        if points:
            parts += [_LEGEND]
        for settings in _unique([point.settings for point in points]):
            of_these = [point for point in points if point.settings == settings]
            parts += [f"### {settings['shape']}, {settings['world_size']} ranks", "", _told(settings), "", _table(of_these), ""]
            parts += [_details(of_these), "", *_level(of_these)]
        for entry in run["entries"]:
            if entry["kind"] == "primitives":
                parts += [_primitives(entry), ""]
            elif entry["kind"] == "curves":
                parts += [_curves(entry), ""]
    return "\n".join(parts).rstrip() + "\n"


def describe_machine(facts: dict[str, Any]) -> str:
    """A machine in a few words."""
    accelerators = facts.get("accelerators") or []
    if accelerators:
        return f"{len(accelerators)} x {accelerators[0]}"
    return f"{facts.get('cpu', 'CPU')}, {facts.get('cores', '?')} cores"


def _told(settings: dict[str, Any]) -> str:
    shown = {key: value for key, value in settings.items() if key not in ("shape", "world_size") and value not in (None, False)}
    return ", ".join(f"{key} {value}".replace("True", "yes") for key, value in shown.items())


def _table(points: Sequence[PointSummary]) -> str:
    header = ["cap", "samples/rank", "arm", "steps", "ms", "speed-up", "x ideal", "share", "idle per rank"]
    rows = []
    for point in points:
        for arm in point.arms:
            share = f"{1 / arm.times_ideal.median:.3f}" if arm.times_ideal else "-"
            idle = " ".join(f"{100 * part:.1f}" for part in arm.idle)
            rows.append(
                [
                    str(point.cap),
                    str(point.samples_per_rank),
                    arm.arm,
                    str(arm.steps),
                    f"{arm.ms.median:.1f} ({arm.ms.q1:.1f}, {arm.ms.q3:.1f})",
                    _spread(arm.speedup),
                    _spread(arm.times_ideal),
                    share,
                    f"{idle} %" if idle else "-",
                ]
            )
    return table(header, rows)


def _details(points: Sequence[PointSummary]) -> str:
    columns: dict[str, Callable[[ArmSummary], str]] = {
        "exposed settle, ms": lambda arm: (
            f"{arm.exposed_settle_ms.median:.2f} (highest {arm.exposed_settle_ms.highest:.2f})" if arm.exposed_settle_ms else "-"
        ),
        "of the step": lambda arm: f"{100 * arm.exposed_settle_share:.3f} %" if arm.exposed_settle_share is not None else "-",
        "all settled, ms": lambda arm: f"{arm.all_settled_ms:.2f}" if arm.all_settled_ms is not None else "-",
        "hidden": lambda arm: f"{100 * arm.hidden_share:.1f} %" if arm.hidden_share is not None else "-",
        "clip, ms": lambda arm: f"{arm.clip_ms:.2f}",
        "optimizer, ms": lambda arm: f"{arm.optimizer_ms:.2f}",
        "host waits per rank, ms": lambda arm: " ".join(f"{ms:.0f}" for ms in arm.host_wait_ms) or "-",
        "host ahead after forward, backward, ms": lambda arm: "{:.0f} {:.0f}".format(*arm.host_ahead_ms) if arm.host_ahead_ms else "-",
        "peak, GiB": lambda arm: f"{arm.peak_gib:.2f}",
        "engine, GiB": lambda arm: f"{arm.engine_gib:.2f} ({arm.engine_seen_gib:.2f})" if arm.engine_gib else "-",
        "loss differs by": lambda arm: f"{arm.loss_difference:.1e}" if arm.loss_difference is not None else "-",
        "norm by": lambda arm: f"{arm.norm_difference:.1e}" if arm.norm_difference is not None else "-",
    }
    rows = [
        [str(point.cap), str(point.samples_per_rank), arm.arm, *(column(arm) for column in columns.values())]
        for point in points
        for arm in point.arms
    ]
    fits = [point.fit_error for point in points if point.fit_error is not None]
    told = f"\n\nThe fit behind the idle column meets ideal's microbatch times to {100 * max(fits):.1f} % (median)." if fits else ""
    return table(["cap", "samples/rank", "arm", *columns], rows) + told


def _level(points: Sequence[PointSummary]) -> list[str]:
    """Where on demand gains nothing, said in words."""
    lines = []
    for point in points:
        ratio = next((arm.speedup.median for arm in point.arms if arm.arm == "odc_nopad" and arm.speedup is not None), None)
        if ratio is not None and abs(ratio - 1.0) <= NOISE:
            lines.append(
                f"{point.samples_per_rank} samples a rank, cap {point.cap}: odc_nopad takes as long as {BASELINE} (ratio {ratio:.3f}); "
                "there collectives do as well."
            )
    return ["\n".join(lines), ""] if lines else []


def _curves(entry: dict[str, Any]) -> str:
    header = ["arm", f"farthest from {BASELINE}", f"spread of {BASELINE}", "within", "loss at the end"]
    rows = [
        [v["arm"], f"{v['farthest']:.2e}", f"{v['spread']:.2e}", "yes" if v["within"] else "NO", f"{v['final']:.4f}"]
        for v in entry["verdicts"]
    ]
    curves = entry["losses"][BASELINE]
    title = f"### Loss curves, {entry['world_size']} ranks, {entry['device']}: {len(curves[0])} steps, {len(curves)} assignments of samples"
    return f"{title}\n\n{table(header, rows)}"


def _primitives(entry: dict[str, Any]) -> str:
    header = [
        "operation",
        "whole tensor, MiB",
        "time, us",
        "GB/s",
        "collective, us",
        "GB/s",
        "of the collective's rate",
        "slows GEMMs by",
        "collective by",
    ]
    rows = []
    for measured in entry["operations"]:
        own, other = measured["engine_us"], measured["collective_us"]
        rate = measured["bytes_moved"] / 1e3  # B/us to GB/s: divide by the time in us
        rows.append(
            [
                measured["operation"],
                f"{measured['nbytes'] / 2**20:g}",
                _quartiles(own),
                f"{rate / median(own):.1f}",
                _quartiles(other),
                f"{rate / median(other):.1f}",
                f"{median(other) / median(own):.2f}",
                _slowdown(measured["beside"], "engine_ms"),
                _slowdown(measured["beside"], "collective_ms"),
            ]
        )
    title = f"### Transfers, {entry['world_size']} ranks, {entry['device']}, transport {entry['transport']}"
    return f"{title}\n\n{table(header, rows)}"


def _slowdown(beside: dict[str, list[float]] | None, key: str) -> str:
    if beside is None:
        return "-"
    return f"{100 * (median(beside[key]) / median(beside['alone_ms']) - 1):.1f} %"


def _quartiles(values: Sequence[float]) -> str:
    q1, q3 = quartiles(values)
    return f"{median(values):.1f} ({q1:.1f}, {q3:.1f})"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.3f} ({spread.q1:.3f}, {spread.q3:.3f}) [{spread.lowest:.3f}..{spread.highest:.3f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _unique(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
