"""Just enough SVG: elements, scales with readable ticks, and a frame with a title and a description for screen readers.

Colours never stand here: an element carries classes, and the page's style sheet gives them colours for light and for dark surroundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CHARACTER_WIDTH = 7.0
"""Pixels an average character takes at the figures' font size of 12."""


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """``<name ...>content</name>``; ``content`` is markup, attributes are escaped. ``cls`` means class, an underscore a hyphen."""
    written = "".join(f' {_attribute(key)}="{escape(_value(value))}"' for key, value in attributes.items() if value != "")
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(x: float, y: float, content: str, cls: str = "", anchor: str = "start") -> str:
    """A line of text; ``anchor`` is start, middle or end."""
    return element("text", escape(content), x=x, y=y, cls=cls, text_anchor="" if anchor == "start" else anchor)


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, cls=cls)


def rect(x: float, y: float, width: float, height: float, cls: str, tip: str = "", radius: float = 0.0) -> str:
    """A rectangle, with a tooltip where ``tip`` is given."""
    rounding: str | float = radius if radius else ""
    return element("rect", tooltip(tip), x=x, y=y, width=max(width, 0.0), height=height, cls=cls, rx=rounding)


def tooltip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def polyline(points: Sequence[tuple[float, float]], cls: str) -> str:
    return element("polyline", points=" ".join(f"{_value(x)},{_value(y)}" for x, y in points), cls=cls)


def frame(*, ident: str, width: float, height: float, title: str, description: str, body: Sequence[str]) -> str:
    """The ``<svg>`` element, scaling to the width of its surroundings.

    Args:
        ident: unique in the page; the ids of title and description are made from it.
        title: what the figure is.
        description: what it shows, for somebody who cannot see it.
    """
    head = element("title", escape(title), id=f"{ident}-title") + element("desc", escape(description), id=f"{ident}-desc")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_value(width)} {_value(height)}" role="img" '
        f'aria-labelledby="{ident}-title {ident}-desc">{head}{"".join(body)}</svg>'
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Scale:
    """Maps ``[low, high]`` to pixels ``[start, end]``; logarithmic on request (then low > 0)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(value) if self.log else value
        return self.start + (place - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values inside; powers of ten on a logarithmic scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / count))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = _round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def tick_label(value: float, log: bool = False) -> str:
    """``1e-6`` style on a logarithmic scale, else the shortest decimal."""
    return f"1e{round(math.log10(value))}" if log else f"{value:.10g}"


def legend(items: Sequence[tuple[str, str]], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Swatches with names, wrapped to ``width``; ``items`` are (class, name). Returns the elements and the height taken."""
    parts: list[str] = []
    left, row = x, 0
    for cls, name in items:
        need = 18 + CHARACTER_WIDTH * len(name) + 14
        if left > x and left + need > x + width:
            left, row = x, row + 1
        parts.append(rect(left, y + 18 * row, 12, 12, cls, radius=2))
        parts.append(text(left + 18, y + 18 * row + 10, name))
        left += need
    return parts, 18.0 * (row + 1)


def _round_step(raw: float) -> float:
    if raw <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= raw * (1 - 1e-9)), 10.0 * power)


def _attribute(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
