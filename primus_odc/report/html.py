"""``index.html``: the whole comparison on one page that needs nothing else, no network and no script.

Every figure is in the page twice, drawn for a desk and for a phone; the style sheet shows one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path

from primus_odc._words import counted
from primus_odc.report.figures import idle_figure, loss_figure, series_class, step_time_figure
from primus_odc.report.ladder_figure import ladder_figure
from primus_odc.report.result import ComparisonResult
from primus_odc.report.style import STYLE
from primus_odc.report.table import HEADINGS, cells
from primus_odc.report.timeline_figure import timeline_figure
from primus_odc.report.wording import LADDER_DEFINITION, NOISE, TABLE_DEFINITION, rungs, sentences

WIDE, HALF, NARROW = 1032.0, 494.0, 358.0

Figure = Callable[[ComparisonResult, float, str], str | None]


def write_page(result: ComparisonResult, path: Path) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(result), encoding="utf-8")


def render_page(result: ComparisonResult) -> str:
    """The page as text."""
    arms = ", ".join(arm.arm for arm in result.arms)
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in [*sentences(result), *result.notes])
    steps = _section(
        "Step times",
        "A dot is a step, the box holds the middle half of them, the line is the median.",
        _figure(result, step_time_figure, "steps", HALF),
    )
    loss = _section(
        "Loss",
        "All curves over one another. Below, how far each is from the baseline; the dashed line is the 1e-5 that arms keep in fp32.",
        _figure(result, loss_figure, "loss", HALF),
    )
    body = [
        f"<header><h1>Training with {escape(arms)}</h1><p class='lead'>{escape(subtitle(result))}</p></header>",
        f"<div class='tiles'>{''.join(_tiles(result))}</div><ul class='said'>{said}</ul>",
        _section("All arms", TABLE_DEFINITION, _table(result)),
        _ladder(result),
        _timeline(result),
        f"<div class='pair'>{loss}{steps}</div>",
        _section(
            "Idle ranks",
            "Share of the time in which a rank computed nothing: waiting and exposed communication together.",
            _figure(result, idle_figure, "idle", WIDE),
        ),
        _section("How this was made", "", _facts(result)),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Comparison: {escape(arms)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def subtitle(result: ComparisonResult) -> str:
    """One line: what ran where."""
    parts = [counted(result.arms[0].world_size, "rank"), f"{counted(len(result.arms[0].ms_per_step), 'step')} per arm"]
    for key in ("accelerators", "cpu"):
        value = result.machine.get(key)
        if value:
            parts.append(f"{value[0]} x {len(value)}" if isinstance(value, list) else str(value))
            break
    if result.date:
        parts.append(result.date)
    return " · ".join(parts)


def _tiles(result: ComparisonResult) -> list[str]:
    best = "odc_nopad" if "odc_nopad" in result.speedup else next(iter(result.speedup), None)
    tiles = []
    if best is not None:
        ratio = result.speedup[best]
        verdict = "" if abs(ratio - 1) <= NOISE else "better" if ratio > 1 else "worse"
        tiles.append(_tile(f"{ratio:.2f}x", f"speed of {best} step by step, {result.baseline} is 1", verdict))
        if best in result.ideal_share:
            tiles.append(_tile(f"{100 * result.ideal_share[best]:.0f} %", f"of the ideal speed reached by {best}"))
        base_idle, own_idle = (100 * sum(result[arm].idle_fraction) / result[arm].world_size for arm in (result.baseline, best))
        tiles.append(_tile(f"{base_idle:.0f} → {own_idle:.0f} %", f"mean idle share, {result.baseline} → {best}"))
    if result.agreement:
        tiles.append(_tile(f"{max(result.agreement.values()):.0e}", "largest relative loss difference"))
    return tiles


def _tile(value: str, label: str, verdict: str = "") -> str:
    return f"<div class='tile {verdict}'><b>{escape(value)}</b><span>{escape(label)}</span></div>"


def _section(title: str, caption: str, content: str) -> str:
    told = f"<p class='caption'>{escape(caption)}</p>" if caption else ""
    return f"<section><h2>{escape(title)}</h2>{told}{content}</section>"


def _figure(result: ComparisonResult, draw: Figure, name: str, wide: float) -> str:
    drawn = ((cls, draw(result, width, f"{name}-{cls}")) for cls, width in (("wide", wide), ("narrow", NARROW)))
    return "".join(f"<div class='{cls}'>{svg}</div>" for cls, svg in drawn if svg is not None)


def _ladder(result: ComparisonResult) -> str:
    parts = [f"<dt>{escape(item.name)}</dt><dd>{escape(item.meaning)}</dd>" for item in rungs(result) if not item.level]
    if not parts:
        return _section("The ladder", "Needs nccl_pad, odc_pad and odc_nopad in one comparison.", "")
    caption = (
        "Where the time between two arms goes, split with the help of compute times: what a perfect network would not change, "
        f"and what only the library costs. {LADDER_DEFINITION}"
    )
    return _section("The ladder", caption, _figure(result, ladder_figure, "ladder", WIDE) + f"<dl class='notes'>{''.join(parts)}</dl>")


def _timeline(result: ComparisonResult) -> str:
    if not result.timelines:
        return _section("One minibatch", "No timeline was recorded in this comparison.", "")
    caption = (
        f"Step {result.timelines[0].step + 1} of every arm, the same samples, one time axis. Thin gaps separate microbatches; "
        "point at a bar for its name and duration."
    )
    return _section("One minibatch", caption, _figure(result, timeline_figure, "timeline", WIDE))


def _table(result: ComparisonResult) -> str:
    head = "".join(f"<th scope='col'>{escape(heading)}</th>" for heading in HEADINGS)
    rows = []
    for arm in result.arms:
        first, *rest = cells(result, arm)
        key = f"<span class='key {series_class(result, arm.arm)}'></span>"
        rows.append(f"<tr><th scope='row'>{key}{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>")
    if result.ideal_ms is not None:
        blank = "<td></td>" * (len(HEADINGS) - 2)
        rows.append(
            f"<tr class='ideal'><th scope='row'><span class='key s-ideal'></span>ideal</th><td>{result.ideal_ms:.1f}</td>{blank}</tr>"
        )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _facts(result: ComparisonResult) -> str:
    facts: list[tuple[str, object]] = [("date", result.date), ("command", result.command), ("seed", result.seed)]
    facts += [*result.machine.items(), *result.versions.items(), *result.config.items()]
    rows = []
    for name, value in facts:
        if value not in (None, ""):
            shown = value if isinstance(value, str) else json.dumps(value)
            shown = f"<code>{escape(shown)}</code>" if name == "command" else escape(shown)
            rows.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{shown}</dd>")
    return f"<dl>{''.join(rows)}</dl>"
