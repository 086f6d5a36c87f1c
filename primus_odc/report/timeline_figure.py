"""One minibatch of every arm on one time axis: a row per rank, waiting hatched, so that one sees who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from primus_odc.report.result import ComparisonResult
from primus_odc.report.svg import Scale, element, frame, legend, line, rect, text, tick_label
from primus_odc.report.timeline import Span, SpanKind, Timeline

NAMES: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "wait": "waiting for a rank",
    "communication": "communication",
    "settle": "settle",
    "publish": "publish",
    "optimizer": "optimizer",
    "idle": "idle",
}
SMALLEST = 0.35
"""Pixels: shorter spans are merged into their neighbours for drawing, the totals in the tooltips stay exact."""


def timeline_figure(result: ComparisonResult, width: float, ident: str) -> str | None:
    """The figure; None where no timeline was recorded."""
    timelines = result.timelines
    if not timelines:
        return None
    ranks = max(timeline.world_size for timeline in timelines)
    row = max(4.0, min(20.0, 200.0 / ranks))
    labels = 50.0 if row >= 12 else 2.0
    x = Scale(low=0, high=max(timeline.end_ms for timeline in timelines) or 1.0, start=labels, end=width - 8)
    present = {span.kind for timeline in timelines for span in timeline.spans}
    swatches = [
        (f"k-{kind} hatched-{ident}" if kind in ("wait", "idle") else f"k-{kind}", name) for kind, name in NAMES.items() if kind in present
    ]
    body = [_hatching(ident)]
    drawn, y = legend(swatches, 0, 0, width)
    body += drawn
    y += 12
    for timeline in timelines:
        body.append(text(2, y + 13, timeline.arm, "strong"))
        body.append(text(x.end, y + 13, f"{timeline.end_ms:.1f} ms", "tick", "end"))
        y += 20
        top = y
        for rank in range(timeline.world_size):
            own = [span for span in timeline.spans if span.rank == rank]
            if labels > 10:
                body.append(text(2, y + row / 2 + 4, f"rank {rank}", "tick"))
            body += [_bar(span, x, y, row - 2, ident) for span in merge_small(own, SMALLEST / (x(1.0) - x(0.0)))]
            body += [line(x(start), y, x(start), y + row - 2, "microbatch") for start in _microbatch_starts(own)[1:]]
            y += row
        body.append(line(x(timeline.end_ms), top - 4, x(timeline.end_ms), y + 2, "end"))
        y += 12
    body += [text(x(tick), y + 8, tick_label(tick), "tick", "start" if tick == 0 else "middle") for tick in x.ticks(6)]
    body.append(text(x.end, y + 25, "ms", "axis-title", "end"))
    description = " ".join(_told(timeline) for timeline in timelines)
    title = f"What every rank did in step {timelines[0].step + 1}, arm by arm"
    return frame(ident=ident, width=width, height=y + 30, title=title, description=description, body=body)


def merge_small(spans: Sequence[Span], smallest_ms: float) -> list[Span]:
    """Spans for drawing: neighbours of one kind and microbatch joined, and runs of spans too short to see joined under the kind that
    fills most of the run."""
    joined: list[Span] = []
    for too_short, group in groupby(spans, key=lambda span: span.duration_ms < smallest_ms):
        run = list(group)
        while run:
            if too_short:
                count = next((n for n in range(1, len(run)) if run[n - 1].end_ms - run[0].start_ms >= smallest_ms), len(run))
            else:
                count = next(
                    (n for n in range(1, len(run)) if (run[n].kind, run[n].microbatch) != (run[0].kind, run[0].microbatch)), len(run)
                )
            head, run = run[:count], run[count:]
            totals: dict[SpanKind, float] = {}
            for span in head:
                totals[span.kind] = totals.get(span.kind, 0.0) + span.duration_ms
            kind = max(totals, key=lambda item: totals[item])
            first = head[0]
            label = first.label if len(head) == 1 else ""
            joined.append(
                Span(rank=first.rank, kind=kind, start_ms=first.start_ms, end_ms=head[-1].end_ms, microbatch=first.microbatch, label=label)
            )
    return joined


def _bar(span: Span, x: Scale, y: float, height: float, ident: str) -> str:
    where = "" if span.microbatch is None else f", microbatch {span.microbatch}"
    what = f" ({span.label})" if span.label else ""
    tip = f"rank {span.rank}{where}: {NAMES[span.kind]}{what}, {span.duration_ms:.2f} ms"
    cls = f"k-{span.kind}"
    if span.kind in ("wait", "idle"):
        cls += f" hatched-{ident}"
    return rect(x(span.start_ms), y, x(span.end_ms) - x(span.start_ms), height, cls, tip)


def _hatching(ident: str) -> str:
    """The patterns of waiting and idle: told apart from computing without colour. The styles stand beside them because they name the
    pattern's id."""
    patterns = "".join(
        element(
            "pattern",
            rect(0, 0, 5, 5, f"k-{kind}-ground") + line(0, 0, 0, 5, f"k-{kind}-line"),
            id=f"{ident}-{kind}",
            width=5,
            height=5,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        )
        for kind in ("wait", "idle")
    )
    rules = "".join(f".k-{kind}.hatched-{ident}{{fill:url(#{ident}-{kind})}}" for kind in ("wait", "idle"))
    return element("defs", patterns) + element("style", rules)


def _microbatch_starts(spans: Sequence[Span]) -> list[float]:
    """Where each microbatch of a rank begins."""
    starts: dict[int, float] = {}
    for span in spans:
        if span.microbatch is not None:
            starts.setdefault(span.microbatch, span.start_ms)
    return sorted(starts.values())


def _told(timeline: Timeline) -> str:
    lost = [a + b for a, b in zip(timeline.totals_ms("wait"), timeline.totals_ms("idle"), strict=True)]
    waits = ", ".join(f"rank {rank} {ms:.0f} ms" for rank, ms in enumerate(lost[:16]))
    return f"{timeline.arm} takes {timeline.end_ms:.0f} ms, of which waiting or idle: {waits}."
