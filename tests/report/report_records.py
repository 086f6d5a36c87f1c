"""Realistic records for the tests of the report: a step simulated layer by layer from sample lengths, with an event loop of its own."""

from __future__ import annotations

import random

from primus_odc.report.result import ArmPhases, ArmResult, ComparisonResult
from primus_odc.report.timeline import Span, Timeline, make_timeline

LAYERS = 6
Plan = list[list[float]]


def balanced_plan(costs: list[float], ranks: int) -> Plan:
    """Longest first to the lightest rank; the largest last."""
    plan: Plan = [[] for _ in range(ranks)]
    for cost in sorted(costs, reverse=True):
        min(plan, key=sum).append(cost)
    return [sorted(row) for row in plan]


def padded_plan(costs: list[float], ranks: int) -> Plan:
    """Equal counts, sorted samples dealt out back and forth; short ranks get an almost empty microbatch; own order on every rank, the
    largest last."""
    ordered = sorted(costs, reverse=True)
    count = -(-len(ordered) // ranks)
    ordered += [1.0] * (count * ranks - len(ordered))
    plan: Plan = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        dealt = ordered[start : start + ranks]
        for row, cost in zip(plan, dealt if (start // ranks) % 2 == 0 else reversed(dealt), strict=True):
            row.append(cost)
    order = random.Random(len(costs))
    return [[*order.sample(row[1:], len(row) - 1), row[0]] for row in plan]


def simulate(arm: str, step: int, plan: Plan, noise: random.Random) -> Timeline:
    """Spans of one minibatch: collectives end when the last rank arrived, on-demand transfers take their own time only."""
    ranks = len(plan)
    collective = arm.startswith("nccl")
    now = [noise.uniform(0, 0.5) for _ in range(ranks)]
    spans: list[Span] = []

    def activity(rank: int, kind: str, ms: float, microbatch: int | None = None, label: str = "") -> None:
        spans.append(
            Span(rank=rank, kind=kind, start_ms=now[rank], end_ms=now[rank] + ms, microbatch=microbatch, label=label)  # type: ignore[arg-type]
        )
        now[rank] += ms

    for microbatch in range(max(len(row) for row in plan)):
        for phase, share in (("forward", 1 / 3), ("backward", 2 / 3)):
            for layer in range(LAYERS):
                here = [rank for rank in range(ranks) if microbatch < len(plan[rank])]
                if collective:
                    arrival = max(now)
                    for rank in here:
                        activity(
                            rank, "communication", arrival + noise.uniform(1.2, 2.0) - now[rank], microbatch, f"{phase} all_gather {layer}"
                        )
                for rank in here:
                    if not collective:
                        activity(rank, "communication", noise.uniform(0.1, 0.3), microbatch, f"{phase} gather {layer} of rank {rank}")
                    activity(rank, phase, plan[rank][microbatch] * share / LAYERS * noise.uniform(0.96, 1.06), microbatch, f"layer {layer}")
    last = max(now)
    for rank in range(ranks):
        if not collective:
            activity(rank, "wait", last - now[rank], label="peers' gradients")
            activity(rank, "settle", noise.uniform(2, 4))
        activity(rank, "optimizer", noise.uniform(6, 7))
    return make_timeline(arm, step, spans, ranks)


def make_comparison(steps: int = 30, ranks: int = 4, seed: int = 0, extra_arms: bool = False) -> ComparisonResult:
    """A comparison of simulated arms."""
    noise = random.Random(seed)
    names = ["nccl_pad", *(["nccl_zero2"] if extra_arms else []), "odc_pad", "odc_nopad"]
    minibatches = [[min(400.0, noise.lognormvariate(4.0, 0.9)) for _ in range(4 * ranks)] for _ in range(steps)]
    losses = [5.6 * (0.93**step) + 1.9 + noise.uniform(-0.08, 0.08) for step in range(steps)]
    ideal = [max(sum(row) for row in balanced_plan(costs, ranks)) + 6.5 for costs in minibatches]
    arms, timelines = [], []
    for name in names:
        make = balanced_plan if name == "odc_nopad" else padded_plan
        plans = [make(costs, ranks) for costs in minibatches]
        runs = [simulate(name, step, plan, noise) for step, plan in enumerate(plans)]
        ms = [run.end_ms * (2.5 if noise.random() < 0.03 else 1.0) + (60 if step == 0 else 0) for step, run in enumerate(runs)]
        compute = [[a + b for a, b in zip(run.totals_ms("forward"), run.totals_ms("backward"), strict=True)] for run in runs]
        optimizer = [run.totals_ms("optimizer") for run in runs]
        arms.append(
            ArmResult.measure(
                arm=name,
                ms_per_step=ms,
                loss=[value * (1 + (0 if name == "nccl_pad" else noise.gauss(0, 2e-7))) for value in losses],
                grad_norm=[2.0 + noise.random() for _ in losses],
                tokens=[round(9 * sum(costs)) for costs in minibatches],
                microbatches=[[len(row) for row in plan] for plan in plans],
                busy_ms=[[c + o for c, o in zip(*rows, strict=True)] for rows in zip(compute, optimizer, strict=True)],
                warmup_steps=2,
                phases=ArmPhases(
                    compute_ms=compute,
                    communication_ms=[run.totals_ms("communication") for run in runs],
                    wait_ms=[run.totals_ms("wait") for run in runs],
                    optimizer_ms=optimizer,
                ),
                microbatch_ms=plans,
            )
        )
        timelines.append(runs[steps // 2])
    return ComparisonResult.build(
        arms=arms,
        warmup_steps=2,
        machine={"cpu": "Example CPU 3000", "cores": ranks, "memory_gib": 15.6, "system": "Linux x86_64"},
        ideal_ms_per_step=ideal,
        timelines=timelines,
        config={"num_layers": LAYERS, "hidden_size": 256, "global_batch_size": 4 * ranks},
        seed=seed,
        versions={"python": "3.11.2", "torch": "2.13.0"},
        command="primus-odc compare quickstart.yaml",
        date="2026-01-02T03:04:05Z",
    )
