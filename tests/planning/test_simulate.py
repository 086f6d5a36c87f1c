"""Predictions against time lines worked out by hand, and against an event-by-event lockstep simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.planning import CostModel, MinibatchPlan, Policy, plan_minibatch
from primus_odc.planning.simulate import ARM_POLICY, ARMS, Arm, predict_step

LINEAR = CostModel.from_config("linear")


def plan(policy: Policy, *ranks: list[int]) -> MinibatchPlan:
    """A plan of one sample per microbatch with these lengths per rank; 0 is an empty bucket."""
    lengths: list[int] = []
    microbatches = []
    for rank in ranks:
        buckets = []
        for length in rank:
            buckets.append((len(lengths),) if length else ())
            lengths += [length] if length else []
        microbatches.append(tuple(buckets))
    return MinibatchPlan(policy=policy, lengths=tuple(lengths), max_tokens=1000, microbatches=tuple(microbatches))


@pytest.mark.parametrize(
    ("arm", "ranks", "step_cost", "idle"),
    [
        # Microbatch by microbatch the longest: 30 + 60.
        ("nccl_pad", ([30, 40], [10, 60]), 90, [20 / 90, 20 / 90]),
        ("nccl_localsort", ([0, 40], [10, 60]), 70, [29 / 70, 0]),
        # Nobody waits: the longer rank.
        ("odc_pad", ([30, 40], [10, 60]), 70, [0, 0]),
        ("odc_nopad", ([30, 40, 50], [60], []), 120, [0, 0.5, 1]),
        # First forward max(10, 20) = 20, last backward max(60, 40) = 60, between max(30 + 90 - 10 - 60, 60 - 60) = 50.
        ("nccl_zero2", ([30, 90], [60]), 20 + 50 + 60, [10 / 130, 70 / 130]),
        # One microbatch each is lockstep.
        ("nccl_zero2", ([30], [60]), 60, [0.5, 0]),
        # A rank without a sample takes part with a padding token.
        ("nccl_zero2", ([30], []), 30, [0, 29 / 30]),
    ],
)
def test_by_hand(arm: Arm, ranks: tuple[list[int], ...], step_cost: float, idle: list[float]) -> None:
    prediction = predict_step(arm, plan(ARM_POLICY[arm], *ranks), LINEAR)
    assert prediction.step_cost == pytest.approx(step_cost)
    assert prediction.idle_fraction.tolist() == pytest.approx(idle)


def lockstep_layers(costs: list[list[float]], layers: int) -> float:
    """All ranks start each layer of each microbatch together."""
    now = 0.0
    for position in range(len(costs[0])):
        for _ in range(layers):
            now = max(now + rank[position] / layers for rank in costs)
    return now


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 6), st.integers(0, 50))
def test_order_of_the_arms(lengths: list[int], ranks: int, fixed: int) -> None:
    model = replace(CostModel.from_config("attention"), fixed=fixed / 1e4)
    plans = {policy: plan_minibatch(policy, lengths, ranks, 100, model) for policy in set(ARM_POLICY.values())}
    steps = {arm: predict_step(arm, plans[ARM_POLICY[arm]], model) for arm in ARMS}
    for arm, prediction in steps.items():
        assert all(-1e-9 <= idle <= 1 for idle in prediction.idle_fraction), arm
    for arm in ("nccl_pad", "nccl_localsort"):
        costs = [rank.tolist() for rank in plans[ARM_POLICY[arm]].microbatch_costs(model)]
        assert steps[arm].step_cost == pytest.approx(lockstep_layers(costs, 5))
    assert steps["odc_pad"].step_cost <= steps["nccl_pad"].step_cost * (1 + 1e-9)
    assert steps["odc_nopad"].step_cost <= steps["odc_pad"].step_cost * 1.0021
    assert steps["odc_nopad"].step_cost <= steps["nccl_zero2"].step_cost * (1 + 1e-9)
