"""What ``primus-odc plan`` prints: for each number of ranks and batch size, who runs how many microbatches, who waits, which arm is faster.

Minibatches are drawn from the lengths in a shuffled order, planned with every arm's policy, and added up: a speed-up is the ratio of two
arms' total predicted times over the same minibatches.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from primus_odc._words import counted
from primus_odc.config import OdcConfig
from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel
from primus_odc.planning.policies import plan_minibatch
from primus_odc.planning.simulate import ARM_MEANING, ARM_POLICY, ARMS, BASELINES, predict_step

_WIDTH = 118
_EVEN = 1.01  # a predicted gain below this is within what communication itself can cost


@dataclass(kw_only=True, slots=True, frozen=True)
class PlanSettings:
    """What is planned beside the lengths."""

    world_sizes: Sequence[int]
    """Numbers of ranks to report."""

    samples_per_rank: Sequence[int]
    """Batch sizes to report: samples of a minibatch divided by ranks; not read with ``global_batch_size``."""

    global_batch_size: int | None = None
    """Samples of a minibatch on any number of ranks."""

    max_tokens: int
    """Most tokens of one microbatch."""

    cost_model: CostModel
    """What a microbatch costs."""

    cost_model_source: str = "--cost-model"
    """The option or key that gave it; ``odc.cost_model``: training plans with it."""

    minibatches: int = 16
    """Minibatches to average over; fewer if there are not enough samples."""

    seed: int = 0
    """Seed of the order in which samples are drawn."""


def plan_report(lengths: npt.ArrayLike, settings: PlanSettings, *, source: str) -> dict[str, Any]:
    """Plan and predict every combination of ranks and batch size.

    Args:
        lengths: [n] tokens per sample; error messages name samples by their position here.
        source: where the lengths come from, for the header.

    Returns:
        A dict of JSON types; :func:`render` makes text of it.

    Raises:
        PlanError: a sample over the cap, or fewer samples than one minibatch.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return {
        "source": source,
        "samples": len(tokens),
        "tokens": {
            "mean": float(tokens.mean()),
            "p50": float(np.percentile(tokens, 50)),
            "p90": float(np.percentile(tokens, 90)),
            "p99": float(np.percentile(tokens, 99)),
            "max": int(tokens.max()),
        },
        "max_tokens_per_microbatch": settings.max_tokens,
        "cost_model": settings.cost_model.name,
        "cost_model_source": settings.cost_model_source,
        "microbatch_cost": settings.cost_model.fixed_tokens,
        "arms": dict(ARM_MEANING),
        "points": [_point(tokens, settings, ranks, size) for ranks in settings.world_sizes for size in _batch_sizes(settings, ranks)],
    }


def _batch_sizes(settings: PlanSettings, world_size: int) -> list[int]:
    """Samples of a minibatch, all ranks together."""
    if settings.global_batch_size is not None:
        return [settings.global_batch_size]
    return [world_size * samples for samples in settings.samples_per_rank]


def _batch(world_size: int, size: int) -> str:
    """Ranks and samples of a minibatch, in words."""
    each, rest = divmod(size, world_size)
    return f"{counted(world_size, 'rank')}, " + (
        f"{counted(size, 'sample')} a minibatch" if rest else f"{counted(each, 'sample')} per rank"
    )


def _point(tokens: npt.NDArray[np.int64], settings: PlanSettings, world_size: int, size: int) -> dict[str, Any]:
    count = min(settings.minibatches, len(tokens) // size)
    if count < 1:
        raise PlanError(
            f"{_batch(world_size, size)}: {size} are needed, but there are {len(tokens)}; give more lengths, fewer ranks or a smaller batch"
        )
    order = np.random.default_rng(settings.seed).permutation(len(tokens))
    step_costs: dict[str, list[float]] = {arm: [] for arm in ARMS}
    busy = {arm: np.zeros(world_size) for arm in ARMS}
    counts: dict[str, list[list[int]]] = {arm: [] for arm in ARMS}
    planning_ms: dict[str, list[float]] = {policy: [] for policy in ARM_POLICY.values()}
    for minibatch in range(count):
        chosen = order[minibatch * size : (minibatch + 1) * size]
        plans = {}
        for policy, times in planning_ms.items():
            started = time.perf_counter()
            plans[policy] = plan_minibatch(
                policy,  # type: ignore[arg-type]
                tokens[chosen].tolist(),
                world_size,
                settings.max_tokens,
                settings.cost_model,
                [f"sample {i}" for i in chosen],
            )
            times.append(1e3 * (time.perf_counter() - started))
        for arm in ARMS:
            prediction = predict_step(arm, plans[ARM_POLICY[arm]], settings.cost_model)
            step_costs[arm].append(prediction.step_cost)
            busy[arm] += prediction.busy
            counts[arm].append(list(plans[ARM_POLICY[arm]].counts))
    total = {arm: sum(costs) for arm, costs in step_costs.items()}
    return {
        "ranks": world_size,
        "global_batch_size": size,
        "samples_per_rank": size / world_size if size % world_size else size // world_size,
        "minibatches": count,
        "planning_ms_median": {policy: float(np.median(times)) for policy, times in planning_ms.items()},
        "arms": [
            {
                "arm": arm,
                "policy": ARM_POLICY[arm],
                "step_cost": step_costs[arm],
                "microbatches": counts[arm],
                "idle_fraction": (1.0 - busy[arm] / total[arm]).tolist(),
                "speedup_over": {baseline: total[baseline] / total[arm] for baseline in BASELINES},
            }
            for arm in ARMS
        ],
    }


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    tokens = report["tokens"]
    spread = ", ".join(f"{key} {tokens[key]:.0f}" for key in ("mean", "p50", "p90", "p99", "max"))
    lines = [
        f"{report['source']}: {report['samples']} samples, tokens {spread}",
        f"cap {report['max_tokens_per_microbatch']} tokens per microbatch; cost model {report['cost_model']} "
        f"({report['cost_model_source']}), a microbatch costs {report['microbatch_cost']:g} tokens beside its samples",
        *_where_training_differs(report["cost_model_source"]),
        "Predicted from computing and waiting alone: communication itself is not in these numbers.",
        *(f"{arm:<14}  {line}" for name, meaning in report["arms"].items() for arm, line in _lines(name, meaning)),
    ]
    for point in report["points"]:
        lines += ["", *_render_point(point)]
    return "\n".join(lines) + "\n"


def _where_training_differs(cost_model_source: str) -> list[str]:
    if cost_model_source == "odc.cost_model":
        return []
    return [f"Training plans with its own key odc.cost_model instead (default: {OdcConfig().cost_model})."]


def _render_point(point: dict[str, Any]) -> Iterator[str]:
    planning = ", ".join(f"{policy} {ms:.1f} ms" for policy, ms in point["planning_ms_median"].items())
    yield f"{_batch(point['ranks'], point['global_batch_size'])}, {counted(point['minibatches'], 'minibatch')}"
    yield f"  planning one took {planning}"
    over = "  ".join(f"x {baseline:>14}" for baseline in BASELINES)
    yield f"  {'arm':<14}  {'idle mean':>9}  {'idle max':>8}  {over}"
    for arm in point["arms"]:
        idle = np.array(arm["idle_fraction"])
        ratios = "  ".join(f"{arm['speedup_over'][baseline]:>16.3f}" for baseline in BASELINES)
        yield f"  {arm['arm']:<14}  {100 * idle.mean():>8.1f}%  {100 * idle.max():>7.1f}%  {ratios}"
    yield "  microbatches per rank, first minibatch"
    for arm in point["arms"]:
        yield from _wrapped(arm["arm"], [str(count) for count in arm["microbatches"][0]])
    yield "  idle per rank, %"
    for arm in point["arms"]:
        yield from _wrapped(arm["arm"], [f"{100 * idle:.0f}" for idle in arm["idle_fraction"]])
    gains = {arm["arm"]: arm["speedup_over"]["nccl_pad"] for arm in point["arms"]}
    yield from (f"  {line}" for line in textwrap.wrap(_zero2_sentence(gains), _WIDTH))
    if gains["odc_nopad"] < _EVEN:
        yield "  odc_nopad gains less than 1 % over nccl_pad here: collectives would do as well."


def _zero2_sentence(gains: dict[str, float]) -> str:
    """Why nccl_zero2 is where it is; ``gains`` are speed-ups over nccl_pad."""
    own = gains["nccl_zero2"]
    waits = 1.0 - own / gains["odc_nopad"]
    if waits < _EVEN - 1.0:
        return "nccl_zero2 waits no longer than odc_nopad here: where its memory is there, it does as well."
    lost = (
        f"{100 * waits:.0f} % of its step is waiting for the longest first forward and the longest last backward, which odc_nopad with the "
        "same plan does not"
    )
    if own >= _EVEN:
        return f"nccl_zero2 wins over nccl_pad, whose ranks meet in every microbatch, and loses to odc_nopad: {lost}."
    if own > 2.0 - _EVEN:
        return f"nccl_zero2 gains nothing over nccl_pad: {lost}."
    return f"nccl_zero2 loses to nccl_pad: {lost}; with few microbatches a rank those two are most of the step."


def _lines(name: str, meaning: str) -> Iterator[tuple[str, str]]:
    for position, line in enumerate(textwrap.wrap(meaning, _WIDTH - 16)):
        yield name if position == 0 else "", line


def _wrapped(label: str, words: list[str], per_line: int = 32) -> Iterator[str]:
    for start in range(0, len(words), per_line):
        yield f"    {label if start == 0 else '':<14}  " + " ".join(f"{word:>3}" for word in words[start : start + per_line])
