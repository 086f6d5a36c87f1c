"""The comparison on a terminal: one row per arm, the ladder, and what it means; at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from primus_odc.report.result import ArmResult, ComparisonResult
from primus_odc.report.stats import last_mean
from primus_odc.report.wording import LADDER_DEFINITION, TABLE_DEFINITION, rungs, sentences

WIDTH = 100
BAR_WIDTH = 30
HEADINGS = ("arm", "ms/step [quartiles]", "tokens/s", "speed-up", "of ideal", "idle", "microb.", "loss", "max diff")


def render_table(result: ComparisonResult) -> str:
    """The whole text, ending in a newline."""
    blocks = ["\n".join(_align([HEADINGS, *(cells(result, arm) for arm in result.arms), *_ideal_row(result)]))]
    blocks[0] += "\n" + _wrap(TABLE_DEFINITION)
    ladder = ladder_lines(result)
    if ladder:
        blocks.append("\n".join(ladder))
    blocks.append("\n".join(_wrap(sentence) for sentence in [*sentences(result), *result.notes]))
    return "\n\n".join(blocks) + "\n"


def cells(result: ComparisonResult, arm: ArmResult) -> tuple[str, ...]:
    """The row of an arm, one text per heading."""
    base = arm.arm == result.baseline
    low, high = arm.ms_per_step_spread
    counts = [count for step in result.steps for count in arm.microbatches[step]]
    final = last_mean(arm.loss)
    return (
        arm.arm,
        f"{_number(arm.ms_per_step_median)} [{_number(low)} {_number(high)}]",
        f"{arm.tokens_per_s:,.0f}",
        "1" if base else f"{result.speedup[arm.arm]:.2f}x",
        f"{100 * result.ideal_share[arm.arm]:.1f} %" if arm.arm in result.ideal_share else "-",
        _range(round(100 * min(arm.idle_fraction)), round(100 * max(arm.idle_fraction))) + " %",
        _range(min(counts), max(counts)),
        "-" if final is None else f"{final:.4f}",
        "-" if base else f"{result.agreement[arm.arm]:.1e}",
    )


def ladder_lines(result: ComparisonResult) -> list[str]:
    """The ladder as bars of text; a part that adds time is marked with a plus."""
    lines = rungs(result)
    if not lines:
        return []
    longest = max(line.ms for line in lines)
    texts = [textwrap.fill(f"ladder, ms per step. {LADDER_DEFINITION}", WIDTH)]
    for line in lines:
        if line.quartiles is None:
            bar = "#" * max(1, round(BAR_WIDTH * line.ms / longest))
            texts.append(f"  {line.name:<28}{line.ms:>10.1f}  {bar}")
        else:
            high, low = (f"{-ms:+.1f}" for ms in line.quartiles)
            texts.append(f"    {line.name:<26}{-line.ms:>+10.1f} {f'[{low} {high}]':<19}  {line.meaning}")
    return texts


def _ideal_row(result: ComparisonResult) -> list[tuple[str, ...]]:
    if result.ideal_ms is None:
        return []
    return [("ideal", _number(result.ideal_ms), *([""] * (len(HEADINGS) - 2)))]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest text; the first flush left, all others flush right; a rule under the headings."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [texts[0].rstrip(), "-" * len(texts[0]), *(text.rstrip() for text in texts[1:])]


def _wrap(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, subsequent_indent="  ")


def _number(ms: float) -> str:
    return f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"
