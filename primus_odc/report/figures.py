"""The figures over steps and ranks: loss curves, step times, idle shares. Each is made for a given width in pixels, because a phone gets
its own."""

from __future__ import annotations

from collections.abc import Sequence

from primus_odc.report.result import ComparisonResult
from primus_odc.report.stats import median, quartiles, relative_differences
from primus_odc.report.svg import Scale, element, frame, legend, line, polyline, rect, text, tick_label, tooltip
from primus_odc.report.wording import AGREEMENT_BOUND

SERIES = ("nccl_pad", "odc_pad", "odc_nopad", "nccl_localsort", "nccl_zero2")
SMALLEST_DIFFERENCE = 1e-9
"""Differences below this, zero included, are drawn here."""
LEFT = 46.0


def series_class(result: ComparisonResult, arm: str) -> str:
    """The class that gives an arm its colour: fixed for the known arms, by position for others."""
    names = [item.arm for item in result.arms]
    return f"s{SERIES.index(arm) if arm in SERIES else names.index(arm)}"


def loss_figure(result: ComparisonResult, width: float, ident: str) -> str:
    """All loss curves over one another, and below on a logarithmic scale how far each is from the baseline."""
    steps = len(result.arms[0].loss)
    items = [(f"fill {series_class(result, arm.arm)}", arm.arm) for arm in result.arms]
    body, taken = legend(items, 0, 0, width)
    top, height, gap, lower = taken + 26, 190.0, 62.0, 110.0
    x = Scale(low=0, high=max(steps - 1, 1), start=LEFT, end=width - 8)
    losses = [value for arm in result.arms for value in arm.loss if value is not None] or [0.0]
    pad = 0.06 * (max(losses) - min(losses)) or 0.5
    y = Scale(low=min(losses) - pad, high=max(losses) + pad, start=top + height, end=top)
    body += [text(0, top - 10, "loss", "axis-title"), *_horizontal_grid(y, x, 5)]
    for index, arm in enumerate(result.arms):
        weight = ("thick", "dashed", "thin")[min(index, 2)]
        body += [polyline(points, f"line {weight} {series_class(result, arm.arm)}") for points in _runs(arm.loss, x, y)]

    base = result[result.baseline]
    top_low = top + height + gap
    differences = {arm.arm: relative_differences(arm.loss, base.loss) for arm in result.arms if arm is not base}
    largest = max((d for values in differences.values() for d in values if d is not None), default=0.0)
    y_low = Scale(low=SMALLEST_DIFFERENCE, high=max(1e-4, 3 * largest), start=top_low + lower, end=top_low, log=True)
    body += [text(0, top_low - 10, f"relative difference to {base.arm}", "axis-title"), *_horizontal_grid(y_low, x, 4)]
    body.append(line(x.start, y_low(AGREEMENT_BOUND), x.end, y_low(AGREEMENT_BOUND), "bound"))
    for name, values in differences.items():
        clamped = [None if value is None else max(value, SMALLEST_DIFFERENCE) for value in values]
        cls = series_class(result, name)
        body += [polyline(points, f"line thin {cls}") for points in _runs(clamped, x, y_low)]
        for step, value in enumerate(values):
            if value is not None:
                tip = tooltip(f"{name}, step {step + 1}: {value:.1e}")
                body.append(element("circle", tip, cx=x(step), cy=y_low(max(value, SMALLEST_DIFFERENCE)), r=1.8, cls=f"fill {cls}"))
    bottom = top_low + lower
    body += [text(x(tick), bottom + 17, tick_label(tick), "tick", "middle") for tick in x.ticks(6) if tick == int(tick)]
    body.append(text(x.end, bottom + 34, "step", "axis-title", "end"))
    worst = max(result.agreement.values(), default=0.0)
    description = (
        f"Loss of {', '.join(arm.arm for arm in result.arms)} over {steps} steps, from {losses[0]:.3f} to {min(losses):.3f} at the lowest. "
        f"The largest relative difference to {base.arm} at any step is {worst:.1e}; the dashed line is {AGREEMENT_BOUND:g}."
    )
    return frame(ident=ident, width=width, height=bottom + 40, title="Loss of every arm", description=description, body=body)


def step_time_figure(result: ComparisonResult, width: float, ident: str) -> str:
    """One dot per measured step, one row per arm, with the quartiles as a box and the median as a line."""
    rows = [(arm.arm, series_class(result, arm.arm), [arm.ms_per_step[step] for step in result.steps]) for arm in result.arms]
    if result.ideal_ms_per_step is not None:
        rows.append(("ideal", "s-ideal", [result.ideal_ms_per_step[step] for step in result.steps]))
    # A step that something else on the machine interrupted must not squeeze all others: it is drawn at the edge, and counted there.
    limit = 1.05 * min(max(max(v) for _, _, v in rows), max(quartiles(v)[1] + 3 * (quartiles(v)[1] - quartiles(v)[0]) for _, _, v in rows))
    row_height, top = 66.0, 6.0
    x = Scale(low=0, high=limit, start=2, end=width - 10)
    bottom = top + row_height * len(rows)
    body = [line(x(tick), top, x(tick), bottom, "grid") for tick in x.ticks(5)]
    for index, (name, cls, values) in enumerate(rows):
        label_y, middle = top + row_height * index + 14, top + row_height * index + 40
        low, high = quartiles(values)
        center = median(values)
        beyond = sum(value > limit for value in values)
        body.append(text(2, label_y, name, "strong halo"))
        body.append(text(x.end, label_y, f"{center:.1f} ms" + (f", {beyond} beyond the axis" if beyond else ""), "tick halo", "end"))
        body.append(rect(x(low), middle - 11, x(high) - x(low), 22, f"box {cls}", f"{name}: quartiles {low:.1f} to {high:.1f} ms", 3))
        for step, value in zip(result.steps, values, strict=True):
            # Dots are spread by a fixed pattern of the golden ratio, so that equal times stay countable.
            shift = ((step * 0.6180339887) % 1.0 - 0.5) * 18
            tip = tooltip(f"{name}, step {step + 1}: {value:.1f} ms")
            body.append(element("circle", tip, cx=x(min(value, limit)), cy=middle + shift, r=2.6, cls=f"dot {cls}"))
        body.append(line(x(center), middle - 13, x(center), middle + 13, f"median {cls}"))
    body += [text(x(tick), bottom + 17, tick_label(tick), "tick", "start" if tick == 0 else "middle") for tick in x.ticks(5)]
    body.append(text(x.end, bottom + 34, "ms per step", "axis-title", "end"))
    description = "; ".join(
        f"{name}: median {median(v):.1f} ms, quartiles {quartiles(v)[0]:.1f} to {quartiles(v)[1]:.1f} ms" for name, _, v in rows
    )
    return frame(ident=ident, width=width, height=bottom + 40, title="Step times of every arm", description=description, body=body)


def idle_figure(result: ComparisonResult, width: float, ident: str) -> str:
    """One bar per rank, grouped by arm: the share of the time in which the rank did not compute."""
    world = result.arms[0].world_size
    bar = max(2.0, min(14.0, 160.0 / world))
    gap = 2.0 if bar > 4 else 0.5
    highest = max(max(arm.idle_fraction) for arm in result.arms)
    x = Scale(low=0, high=min(1.0, max(0.05, 1.15 * highest)), start=LEFT if bar >= 10 else 2, end=width - 44)
    body: list[str] = []
    y = 0.0
    for arm in result.arms:
        cls = series_class(result, arm.arm)
        body.append(text(2, y + 14, arm.arm, "strong"))
        y += 22
        for rank, share in enumerate(arm.idle_fraction):
            if bar >= 10:
                body.append(text(2, y + bar - 2.5, f"rank {rank}", "tick"))
                body.append(text(x(max(share, 0.0)) + 5, y + bar - 2.5, f"{100 * share:.0f} %", "tick"))
            body.append(
                rect(x.start, y, x(max(share, 0.0)) - x.start, bar, f"fill {cls}", f"{arm.arm}, rank {rank}: {100 * share:.1f} %", 2)
            )
            y += bar + gap
        y += 10
    body += [line(x(tick), 20, x(tick), y - 4, "grid over") for tick in x.ticks(4)]
    body += [text(x(tick), y + 12, f"{100 * tick:.0f} %", "tick", "middle") for tick in x.ticks(4)]
    shares = "; ".join(f"{arm.arm}: {100 * min(arm.idle_fraction):.1f} to {100 * max(arm.idle_fraction):.1f} %" for arm in result.arms)
    description = f"Share of the measured time in which a rank did not compute, lowest to highest rank. {shares}."
    return frame(ident=ident, width=width, height=y + 18, title="Idle share of every rank", description=description, body=body)


def _runs(values: Sequence[float | None], x: Scale, y: Scale) -> list[list[tuple[float, float]]]:
    """The points of a curve, cut where values are missing."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x(step), y(value)))
    return [run for run in runs if run]


def _horizontal_grid(y: Scale, x: Scale, count: int) -> list[str]:
    parts = []
    for tick in y.ticks(count):
        parts.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(text(x.start - 6, y(tick) + 4, tick_label(tick, y.log), "tick", "end"))
    return parts
