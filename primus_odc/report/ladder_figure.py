"""The ladder as a waterfall: full bars for the arms, and between them what was taken off (or added) on the way."""

from __future__ import annotations

from collections.abc import Sequence

from primus_odc.report.figures import series_class
from primus_odc.report.result import ComparisonResult
from primus_odc.report.svg import Scale, frame, line, rect, text, tick_label
from primus_odc.report.wording import Rung, rungs

NARROW = 560.0
"""Below this width labels stand above their bars instead of left of them."""
LABELS = 200.0
VALUE_ROOM = 76.0
MINUS = "\N{MINUS SIGN}"


def ladder_figure(result: ComparisonResult, width: float, ident: str) -> str | None:
    """The figure; None where the comparison has no ladder."""
    lines = rungs(result)
    if not lines:
        return None
    wide = width >= NARROW
    x = Scale(low=0, high=_highest(lines) * 1.02, start=LABELS if wide else 2.0, end=width - VALUE_ROOM)
    row, bar = (30.0, 18.0) if wide else (44.0, 16.0)
    bottom = row * len(lines) + 4
    body = [line(x(tick), 0, x(tick), bottom, "grid") for tick in x.ticks(6 if wide else 4)]
    level = 0.0
    for index, item in enumerate(lines):
        top = row * index
        y = top + (row - bar) / 2 if wide else top + 22
        body.append(
            text(2.0 if item.level else 16.0, y + bar - 5 if wide else top + 15, item.name, "strong halo" if item.level else "halo")
        )
        if item.level:
            level = item.ms
            cls = "s-ideal" if item.name == "ideal" else series_class(result, item.name)
            body.append(rect(x(0), y, x(item.ms) - x(0), bar, f"fill {cls}", f"{item.name}: {item.ms:.1f} ms per step", 3))
            body.append(text(x(item.ms) + 6, y + bar - 5, f"{item.ms:.1f} ms", "strong halo"))
        else:
            after = level - item.ms
            left, right = x(min(level, after)), x(max(level, after))
            kind = "left" if item.name == "remaining" else "saved" if item.ms >= 0 else "added"
            body.append(rect(left, y, max(right - left, 1.5), bar, kind, f"{item.name}: {-item.ms:+.1f} ms ({item.meaning})", 2))
            body.append(text(right + 6, y + bar - 5, f"{MINUS if item.ms >= 0 else '+'}{abs(item.ms):.1f}", f"{kind}-text halo"))
            level = after
        if index + 1 < len(lines):
            body.append(line(x(level), y + bar, x(level), y + row, "link"))
    body += [text(x(tick), bottom + 15, tick_label(tick), "tick", "start" if tick == 0 else "middle") for tick in x.ticks(6 if wide else 4)]
    body.append(text(x.end, bottom + 31, "ms per step (median)", "axis-title", "end"))
    told = "; ".join(f"{item.name} {item.ms:.1f} ms" if item.level else f"{item.name} {-item.ms:+.1f} ms" for item in lines)
    title = "The ladder: " + ", ".join(item.name for item in lines if item.level)
    return frame(ident=ident, width=width, height=bottom + 36, title=title, description=f"From top to bottom: {told}.", body=body)


def _highest(lines: Sequence[Rung]) -> float:
    """The largest time on the way down: a part that adds time may rise above every arm before the next one brings it back."""
    highest = level = 0.0
    for item in lines:
        level = item.ms if item.level else level - item.ms
        highest = max(highest, level)
    return highest
