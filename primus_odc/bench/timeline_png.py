"""The timelines of several arms in one picture: a row per rank, one time axis, waiting hatched in red."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primus_odc.bench.png import Canvas, Colour, text_width
from primus_odc.report.svg import Scale, tick_label
from primus_odc.report.timeline import SpanKind, Timeline

WIDTH, ROW, LEFT, RIGHT = 2400, 26, 110, 20
_INK, _GROUND, _FAINT = (30, 30, 34), (255, 255, 255), (210, 210, 214)
COLOURS: dict[SpanKind, tuple[Colour, Colour | None]] = {
    "forward": ((74, 122, 191), None),
    "backward": ((36, 66, 122), None),
    "communication": ((230, 159, 0), None),
    "settle": ((148, 103, 189), None),
    "publish": ((0, 158, 115), None),
    "optimizer": ((110, 110, 118), None),
    "wait": ((255, 225, 222), (213, 60, 40)),
    "idle": ((246, 246, 247), (214, 214, 218)),
}


def draw_timelines(file: Path, timelines: Sequence[Timeline]) -> None:
    """Write the picture; ranks are rows from the top, microbatches are divided by white lines."""
    heights = [34 + ROW * timeline.world_size + 14 for timeline in timelines]
    canvas = Canvas(WIDTH, 50 + sum(heights) + 40, _GROUND)
    _legend(canvas)
    x = Scale(low=0.0, high=max((t.end_ms for t in timelines), default=1.0) or 1.0, start=LEFT, end=WIDTH - RIGHT)
    y = 50
    for timeline, height in zip(timelines, heights, strict=True):
        canvas.text(8, y + 10, f"{timeline.arm}  {timeline.end_ms:.1f} ms", _INK)
        top = y + 34
        for rank in range(timeline.world_size):
            canvas.text(8, top + ROW * rank + 7, f"rank {rank}", _INK)
        before: dict[int, int | None] = {}
        for span in timeline.spans:
            colour, hatch = COLOURS[span.kind]
            line = top + ROW * span.rank
            canvas.rectangle(x(span.start_ms), line, x(span.end_ms) - x(span.start_ms), ROW - 4, colour, hatch)
            if span.microbatch is not None and span.microbatch != before.get(span.rank, span.microbatch):
                canvas.rectangle(x(span.start_ms) - 1, line, 2, ROW - 4, _GROUND)
            before[span.rank] = span.microbatch if span.microbatch is not None else before.get(span.rank)
        y += height
    canvas.rectangle(LEFT, y, WIDTH - LEFT - RIGHT, 1, _FAINT)
    for tick in x.ticks(10):
        canvas.rectangle(x(tick), y, 1, 6, _INK)
        canvas.text(round(x(tick)), y + 12, tick_label(tick), _INK)
    canvas.text(WIDTH - RIGHT - text_width("ms"), y + 26, "ms", _INK)
    canvas.write(file)


def _legend(canvas: Canvas) -> None:
    left = 8
    for kind, (colour, hatch) in COLOURS.items():
        canvas.rectangle(left, 14, 18, 14, colour, hatch)
        name = "waiting" if kind == "wait" else kind
        canvas.text(left + 24, 16, name, _INK)
        left += 24 + text_width(name) + 26
