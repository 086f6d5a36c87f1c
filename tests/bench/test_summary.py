"""Statistics of made-up steps, against what they must be by hand."""

from __future__ import annotations

from typing import Any

import pytest

from primus_odc.bench.markdown import render
from primus_odc.bench.summary import summarise

SETTINGS: dict[str, Any] = {
    "kind": "train",
    "shape": "tiny",
    "lengths": "longalign-like",
    "layers": None,
    "device": "cuda",
    "world_size": 2,
    "transport": "symm_mem",
    "sequence": 2,
    "seed": 0,
    "optimizer": "local",
    "clip_grad": 1.0,
    "fixed_tokens": 128.0,
    "share_model": False,
    "deterministic": False,
}
LENGTHS = [[[[10], [20, 5]], [[30]]], [[[40]], [[8], [2, 7]]], [[[11], [13]], [[21, 3]]]]
"""[minibatch][rank][microbatch] -> lengths"""
OPTIMIZER_MS = 2.0


def true_ms(rank: int, bucket: list[int]) -> float:
    """A microbatch takes so long without communication; the second GPU is slower."""
    return (1.0 + 0.1 * rank) * (0.5 * sum(bucket) + 0.01 * sum(n * n for n in bucket) + 3.0)


def make_step(minibatch: int, waits: list[float], settle: list[float], hidden: int | None, loss: float) -> dict[str, Any]:
    """A step whose ranks compute, then wait, then settle, clip for 1 ms and update for OPTIMIZER_MS."""
    ranks = []
    for rank, buckets in enumerate(LENGTHS[minibatch]):
        times = [true_ms(rank, bucket) for bucket in buckets]
        computed = sum(times) + waits[rank]
        settled = computed + settle[rank]
        ranks.append(
            {
                "ms": settled + 1.0 + OPTIMIZER_MS,
                "computed_at": computed,
                "settled_at": settled,
                "clipped_at": settled + 1.0,
                "updated_at": settled + 1.0 + OPTIMIZER_MS,
                "microbatch_ms": times,
                "loss_sum": loss / 2,
                "grad_norm": loss / 10,
                "host_ahead_ms": [(5.0 + minibatch + rank + i, 30.0 + rank - i) for i in range(len(times))],
                "host_wait_ms": 4.0 + rank,
                "bytes_gathered": 1000,
                "bytes_reduced": 400,
                "bytes_hidden": hidden,
            }
        )
    return {"minibatch": minibatch, "target_tokens": 10, "microbatches": LENGTHS[minibatch], "ranks": ranks}


def entry(**arms: list[dict[str, Any]]) -> dict[str, Any]:
    memory = [{"resting": 3 * 2**30, "above_resting": 2**30, "engine": 2**29, "engine_seen_by_device": 2**28}] * 2
    return {**SETTINGS, "cap": 64, "samples_per_rank": 2, "steps": arms, "memory": dict.fromkeys(arms, memory)}


ENTRY = entry(
    nccl_pad=[make_step(m, [20.0, 20.0], [0.0, 0.0], None, 50.0) for m in range(3)],
    odc_nopad=[make_step(m, [0.0, 0.0], [0.5 + m, 0.7], 300, 50.0 + 0.001 * m) for m in range(3)],
    ideal=[make_step(m, [0.0, 0.0], [0.0, 0.0], None, 7.0) for m in range(3)],
)


def slowest(minibatch: int) -> float:
    return max(sum(true_ms(rank, bucket) for bucket in buckets) for rank, buckets in enumerate(LENGTHS[minibatch]))


def test_speed_is_compared_minibatch_by_minibatch() -> None:
    (point,) = summarise([ENTRY])
    arms = {arm.arm: arm for arm in point.arms}
    assert (point.samples_per_rank, point.cap, point.minibatches) == (2, 64, 3)
    nccl, odc, ideal = arms["nccl_pad"], arms["odc_nopad"], arms["ideal"]
    assert nccl.ms.lowest == pytest.approx(min(slowest(m) for m in range(3)) + 23.0)
    assert nccl.speedup is None and ideal.times_ideal is None and odc.speedup is not None and odc.times_ideal is not None
    ratios = sorted((slowest(m) + 23.0) / max(step["ms"] for step in ENTRY["steps"]["odc_nopad"][m]["ranks"]) for m in range(3))
    assert (odc.speedup.lowest, odc.speedup.median, odc.speedup.highest) == pytest.approx(tuple(ratios))
    assert odc.loss_difference == odc.norm_difference == pytest.approx(0.002 / 50.0)
    assert ideal.loss_difference is None
    assert odc.peak_gib == 4.0 and odc.engine_gib == 0.5 and odc.engine_seen_gib == 0.25
    assert odc.host_wait_ms == (4.0, 5.0) and odc.hidden_share == 0.75 and nccl.hidden_share is None


def test_the_host_is_ahead_by_the_least_of_any_microbatch_on_the_rank_that_finishes_last() -> None:
    (point,) = summarise([ENTRY])
    odc = next(arm for arm in point.arms if arm.arm == "odc_nopad")
    forward, backward = [], []
    for m in range(3):
        last = max((0, 1), key=lambda rank: sum(true_ms(rank, bucket) for bucket in LENGTHS[m][rank]))
        forward.append(5.0 + m + last)
        backward.append(30.0 + last - (len(LENGTHS[m][last]) - 1))
    assert odc.host_ahead_ms == (sorted(forward)[1], sorted(backward)[1])
    older = [
        {**step, "ranks": [{k: v for k, v in r.items() if k != "host_ahead_ms"} for r in step["ranks"]]} for step in ENTRY["steps"]["ideal"]
    ]
    (point,) = summarise([entry(ideal=older)])
    assert point.arms[0].host_ahead_ms is None


def test_exposed_settle_is_that_of_the_rank_that_finishes_last() -> None:
    (point,) = summarise([ENTRY])
    odc = next(arm for arm in point.arms if arm.arm == "odc_nopad")
    last = [max((0, 1), key=lambda rank: sum(true_ms(rank, b) for b in LENGTHS[m][rank])) for m in range(3)]
    gaps = sorted(0.5 + m if rank == 0 else 0.7 for m, rank in enumerate(last))
    assert len(set(last)) == 2, "both ranks are last in some minibatch"
    assert odc.exposed_settle_ms is not None
    assert (odc.exposed_settle_ms.lowest, odc.exposed_settle_ms.median, odc.exposed_settle_ms.highest) == pytest.approx(tuple(gaps))
    assert odc.clip_ms == pytest.approx(1.0) and odc.optimizer_ms == pytest.approx(OPTIMIZER_MS)


def test_idle_is_what_neither_computes_nor_updates() -> None:
    (point,) = summarise([ENTRY])
    assert point.fit_error == pytest.approx(0.0, abs=1e-9), "the times follow the fitted form exactly"
    nccl = next(arm for arm in point.arms if arm.arm == "nccl_pad")
    for rank in (0, 1):
        parts = sorted(1 - (sum(true_ms(rank, b) for b in LENGTHS[m][rank]) + OPTIMIZER_MS) / (slowest(m) + 23.0) for m in range(3))
        assert nccl.idle[rank] == pytest.approx(parts[1])


def test_several_calls_at_one_point_count_together() -> None:
    (point,) = summarise([ENTRY, ENTRY])
    assert [arm.steps for arm in point.arms] == [6, 6, 6]
    assert len(summarise([ENTRY, {**ENTRY, "cap": 128}, {**ENTRY, "optimizer": "graph"}])) == 3


def test_without_ideal_there_is_no_idle_fraction() -> None:
    (point,) = summarise([entry(nccl_pad=ENTRY["steps"]["nccl_pad"])])
    assert point.fit_error is None and point.arms[0].idle == () and point.arms[0].times_ideal is None


def test_the_tables_hold_every_arm_and_transfer() -> None:
    beside = {"alone_ms": [20.0, 20.0], "engine_ms": [20.4, 20.4], "collective_ms": [22.0, 22.0]}
    moved = {"operation": "gather", "nbytes": 2**26, "calls": 8, "bytes_moved": 2**25, "engine_us": [200.0], "collective_us": [150.0]}
    transfers = {
        "kind": "primitives",
        "device": "cuda",
        "world_size": 2,
        "transport": "symm_mem",
        "operations": [{**moved, "beside": beside}],
    }
    machine = {"accelerators": ["NVIDIA H200"] * 2}
    text = render({"runs": [{"commit": "abc", "machine": machine, "versions": {"torch": "2.11"}, "entries": [ENTRY, transfers]}]})
    assert "## 2 x NVIDIA H200, commit abc" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert sum("odc_nopad" in line for line in lines) == 2
    (gather,) = [line for line in lines if line[0] == "| gather"]
    assert gather[1] == "64" and gather[3] == f"{2**25 / 200e3:.1f}" and gather[6] == "0.75"
    assert gather[7] == "2.0 %" and gather[8].startswith("10.0 %")
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert [len({line.count(" | ") for line in block.splitlines()}) for block in tables] == [1, 1, 1]


def test_a_point_at_which_on_demand_gains_nothing_says_so_and_curves_have_their_verdict() -> None:
    machine, same = {"accelerators": ["NVIDIA H200"] * 2}, ENTRY["steps"]["nccl_pad"]
    on_demand = [{**step, "ranks": [{**rank, "host_wait_ms": 0.0} for rank in step["ranks"]]} for step in same]
    verdict = {"arm": "odc_pad", "farthest": 0.01, "spread": 0.02, "final": 1.5, "within": True}
    curves = {"kind": "curves", "world_size": 2, "device": "cuda", "losses": {"nccl_pad": [[2.0, 1.0]] * 3}, "verdicts": [verdict]}
    runs = [{"commit": "abc", "machine": machine, "versions": {}, "entries": [entry(nccl_pad=same, odc_nopad=on_demand), curves]}]
    text = render({"runs": runs})
    assert "odc_nopad takes as long as nccl_pad (ratio 1.000); there collectives do as well." in text
    assert "collectives do as well" not in render({"runs": [{**runs[0], "entries": [ENTRY]}]})
    assert "### Loss curves, 2 ranks, cuda: 2 steps, 3 assignments" in text
    assert "| odc_pad | 1.00e-02 | 2.00e-02 | yes | 1.5000 |" in text
