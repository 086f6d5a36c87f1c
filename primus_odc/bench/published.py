"""``primus-odc bench published``: the points of the one published single-node table of on-demand communication in Primus.

The table is that of AMD's port of ODC to Primus: eight GPUs, the shape of DeepSeek-R1-Distill-Qwen-1.5B, LongAlign, global batches of 8 to
128, speed-up over collectives with equal counts. Here every point is measured in all arms, reference rows and ``ideal`` included, with
synthetic lengths like LongAlign's: what can be gained depends on the lengths, so read each speed-up beside nccl_pad / ideal of its point.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primus_odc.bench.job import IDEAL
from primus_odc.bench.markdown import describe_machine, table
from primus_odc.bench.summary import BASELINE, ArmSummary, PointSummary, Spread, summarise
from primus_odc.report.stats import median

PUBLISHED_RANKS = 8
ARMS = (BASELINE, "odc_pad", "odc_nopad", "odc_nopad:resident", "nccl_zero2", "nccl_localsort", IDEAL)
MINIBATCHES = 2
BUDGET_S = 480.0
"""So that set-up and the last block should fit into nine minutes; it was never run on eight GPUs."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishedPoint:
    """A row of the published table."""

    odc_nopad: float
    odc_pad: float | None = None
    """None: not published."""


TABLE = {
    1: PublishedPoint(odc_nopad=0.911, odc_pad=0.898),
    2: PublishedPoint(odc_nopad=1.201),
    4: PublishedPoint(odc_nopad=1.142),
    8: PublishedPoint(odc_nopad=1.083),
    16: PublishedPoint(odc_nopad=1.051),
}
"""By samples a rank: global batch 8, 16, 32, 64, 128 on eight ranks."""


def render_published(content: dict[str, Any]) -> str:
    """Markdown: for every commit, machine and setting in ``content`` the points of :data:`TABLE` beside what was published."""
    parts = ["# Beside the published table", ""]
    for run in content["runs"]:
        points = [point for point in summarise(run["entries"]) if point.samples_per_rank in TABLE]
        settings: list[tuple[dict[str, Any], int]] = []
        for point in points:
            if (point.settings, point.cap) not in settings:
                settings.append((point.settings, point.cap))
        for setting, cap in settings:
            of_these = [point for point in points if (point.settings, point.cap) == (setting, cap)]
            ranks = setting["world_size"]
            parts += [f"## {describe_machine(run['machine'])}, {setting['shape']}, cap {cap}, commit {run['commit'] or 'unknown'}", ""]
            if ranks != PUBLISHED_RANKS:
                parts += [
                    f"{ranks} ranks with the published samples a rank; the published table has {PUBLISHED_RANKS} ranks, and fewer ranks "
                    "have less to wait for.",
                    "",
                ]
            parts += [_speedups(of_these), "", _ladder(of_these), ""]
    return "\n".join(parts).rstrip() + "\n"


def _speedups(points: Sequence[PointSummary]) -> str:
    others = [arm for arm in ARMS if arm not in (BASELINE, "odc_nopad", IDEAL)]
    header = ["samples/rank", "global batch", "minibatches", "published odc_nopad", "published odc_pad", "nccl_pad / ideal", "odc_nopad"]
    rows = []
    for point in points:
        arms = {arm.arm: arm for arm in point.arms}
        published = TABLE[point.samples_per_rank]
        possible = arms[BASELINE].times_ideal if BASELINE in arms else None
        rows.append(
            [
                str(point.samples_per_rank),
                str(point.samples_per_rank * point.settings["world_size"]),
                str(point.minibatches),
                f"{published.odc_nopad:.3f}",
                f"{published.odc_pad:.3f}" if published.odc_pad is not None else "-",
                _range(possible),
                _range(_speedup(arms, "odc_nopad")),
                *(_range(_speedup(arms, arm)) for arm in others),
                _verdict(_speedup(arms, "odc_nopad"), possible, published.odc_nopad),
            ]
        )
    told = "Speed-up: nccl_pad / arm, minibatch by minibatch, median [lowest..highest]; nccl_pad / ideal is the most any arm can reach."
    return f"{told}\n\n{table([*header, *others, 'verdict'], rows)}"


def _verdict(speedup: Spread | None, possible: Spread | None, published: float) -> str:
    if speedup is None:
        return "not measured"
    level = "not slower" if speedup.highest >= 1.0 else "slower than nccl_pad"
    if speedup.median > published:
        return f"{level}; above the published figure"
    if possible is not None and possible.median < published:
        return f"{level}; the published figure is more than these lengths allow"
    return f"{level}; below the published figure"


def _ladder(points: Sequence[PointSummary]) -> str:
    header = ["samples/rank", BASELINE, "to odc_pad", "to odc_nopad", "left to ideal", IDEAL, "settle exposed", "settle hidden"]
    rows = []
    for point in points:
        ms = {arm.arm: arm.ms.median for arm in point.arms}
        nopad = next((arm for arm in point.arms if arm.arm == "odc_nopad"), None)
        steps = [BASELINE, "odc_pad", "odc_nopad", IDEAL]
        times = {arm.arm: arm.step_ms for arm in point.arms}
        changes = [_change(times.get(a, {}), times.get(b, {})) for a, b in itertools.pairwise(steps)]
        ends = [f"{ms[name]:.1f}" if name in ms else "-" for name in (BASELINE, IDEAL)]
        rows.append([str(point.samples_per_rank), ends[0], *changes, ends[1], *_settle(nopad)])
    told = (
        "Ladder, ms a step: the arms' medians, and between them the difference minibatch by minibatch, then its median (medians need not "
        "add up); settle of odc_nopad as part of the step and of the gradient bytes."
    )
    return f"{told}\n\n{table(header, rows)}"


def _change(before: Mapping[tuple[int, int], float], after: Mapping[tuple[int, int], float]) -> str:
    differences = [after[key] - ms for key, ms in before.items() if key in after]
    return f"{median(differences):+.1f}" if differences else "-"


def _settle(arm: ArmSummary | None) -> list[str]:
    exposed = f"{100 * arm.exposed_settle_share:.3f} %" if arm and arm.exposed_settle_share is not None else "-"
    hidden = f"{100 * arm.hidden_share:.1f} %" if arm and arm.hidden_share is not None else "-"
    return [exposed, hidden]


def _speedup(arms: dict[str, ArmSummary], arm: str) -> Spread | None:
    return arms[arm].speedup if arm in arms else None


def _range(spread: Spread | None) -> str:
    return f"{spread.median:.3f} [{spread.lowest:.3f}..{spread.highest:.3f}]" if spread is not None else "-"
