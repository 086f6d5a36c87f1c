"""What each policy promises about counts, order and balance."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.errors import PlanError
from primus_odc.planning import POLICIES, CostModel, MinibatchPlan, Policy, plan_minibatch

CAP = 100
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=40)
MODELS = st.sampled_from(
    [
        CostModel.from_config("linear"),
        CostModel.from_config("linear", microbatch_cost=30),
        CostModel.from_config("attention"),
        CostModel.from_config((5e5, 1.0), microbatch_cost=32000),
    ]
)


def naive_costs(plan: MinibatchPlan, model: CostModel) -> list[list[float]]:
    return [[model.microbatch_cost([plan.lengths[i] for i in bucket]) for bucket in buckets] for buckets in plan.microbatches]


def naive_lpt_rank_costs(lengths: list[int], world_size: int, model: CostModel) -> list[float]:
    """Longest first to the lightest rank, by sample costs."""
    loads = [0.0] * world_size
    for cost in sorted((float(model.sample_costs(length)) for length in lengths), reverse=True):
        loads[loads.index(min(loads))] += cost
    return loads


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 12), MODELS, st.sampled_from(POLICIES))
def test_every_policy_keeps_the_cap_and_ends_with_the_costliest(lengths: list[int], ranks: int, model: CostModel, policy: Policy) -> None:
    plan = plan_minibatch(policy, lengths, ranks, CAP, model)
    assert plan.policy == policy and plan.world_size == ranks and list(plan.lengths) == lengths
    placed = list(chain.from_iterable(chain.from_iterable(plan.microbatches)))
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bucket) <= CAP for bucket in chain.from_iterable(plan.microbatches))
    assert all(list(bucket) == sorted(bucket) for bucket in chain.from_iterable(plan.microbatches))
    for costs in naive_costs(plan, model):
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(costs)), "ascending, the costliest last"
    if policy == "lb_mini":
        assert all(chain.from_iterable(plan.microbatches)), "no empty bucket"
    else:
        assert len(set(plan.counts)) == 1


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 12), MODELS)
def test_lb_mini_is_never_slower_than_its_opponents(lengths: list[int], ranks: int, model: CostModel) -> None:
    slowest = plan_minibatch("lb_mini", lengths, ranks, CAP, model).rank_costs(model).max()
    micro = plan_minibatch("lb_micro", lengths, ranks, CAP, model).rank_costs(model).max()
    assert slowest <= micro * 1.0021
    if model.fixed == 0:
        assert slowest <= max(naive_lpt_rank_costs(lengths, ranks, model)) * (1 + 1e-9)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 12), MODELS)
def test_lb_micro_counts_and_lockstep(lengths: list[int], ranks: int, model: CostModel) -> None:
    plan = plan_minibatch("lb_micro", lengths, ranks, CAP, model)
    count = plan.counts[0]
    # First fit decreasing, written independently: lb_micro never needs more.
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        target = next((i for i, filled in enumerate(bins) if filled + length <= CAP), None)
        if target is None:
            bins.append(length)
        else:
            bins[target] += length
    assert -(-sum(lengths) // (CAP * ranks)) <= count <= max(1, -(-len(bins) // ranks) + 1)
    # Sorted buckets dealt out in rows give the smallest sum of row maxima that these buckets allow.
    costs = np.array(naive_costs(plan, model))
    rows = np.sort(costs.ravel()).reshape(count, ranks)
    assert costs.max(axis=0).sum() == pytest.approx(rows.max(axis=1).sum())


def test_localsort_lines_up_lengths() -> None:
    plan = plan_minibatch("localsort", [9, 1, 5, 2, 8, 3, 7], 3, 10, CostModel.from_config("linear"))
    assert plan.microbatches == (((3,), (6,), (0,)), ((), (1,), (4,)), ((), (5,), (2,)))


def test_round_robin_packs_in_the_order_of_arrival() -> None:
    plan = plan_minibatch("round_robin", [4, 9, 4, 1, 4, 9, 9], 2, 10, CostModel.from_config("linear"))
    assert plan.microbatches == (((4,), (0, 2), (6,)), ((), (5,), (1, 3)))


def test_fixed_cost_prefers_fewer_microbatches() -> None:
    # Balanced by tokens alone a rank may need one more microbatch than the others; the fixed cost makes that the slowest rank.
    generator = np.random.default_rng(5)
    for _ in range(20):
        lengths = generator.integers(20, 70, 24).tolist()
        plain = plan_minibatch("lb_mini", lengths, 4, CAP, CostModel.from_config("linear"))
        model = CostModel.from_config("linear", microbatch_cost=200)
        aware = plan_minibatch("lb_mini", lengths, 4, CAP, model)
        assert aware.rank_costs(model).max() <= plain.rank_costs(model).max() + 1e-6
        assert max(aware.counts) <= max(plain.counts)


def test_fewer_samples_than_ranks() -> None:
    linear = CostModel.from_config("linear")
    assert plan_minibatch("lb_mini", [5, 5, 3, 8, 1], 8, 10, linear).counts == (1, 1, 1, 1, 1, 0, 0, 0)
    for policy in ("lb_micro", "localsort", "round_robin"):
        plan = plan_minibatch(policy, [5, 5, 3, 8, 1], 8, 10, linear)
        assert plan.counts == (1,) * 8
        assert sum(bucket == () for bucket in chain.from_iterable(plan.microbatches)) == 3


def test_the_costliest_sample_is_on_the_same_rank_with_and_without_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, CAP, 48).tolist()
    for model in (CostModel.from_config("linear"), CostModel.from_config("attention")):
        for policy in ("lb_mini", "lb_micro"):
            plan = plan_minibatch(policy, lengths, 4, CAP, model)
            assert lengths.index(max(lengths)) in plan.microbatches[0][-1]


@pytest.mark.parametrize(
    ("policy", "lengths", "ranks", "cap", "message"),
    [
        ("lb_min", [1], 1, 8, "use one of lb_mini, lb_micro"),
        ("lb_mini", [], 1, 8, "no sample"),
        ("lb_mini", [1], 0, 8, "world_size is 0"),
        ("lb_mini", [1], 1, 0, "max_tokens_per_microbatch is 0"),
        ("lb_mini", [3, 0], 1, 8, r"without a token: #1 \(0\)"),
    ],
)
def test_wrong_arguments(policy: Policy, lengths: list[int], ranks: int, cap: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_minibatch(policy, lengths, ranks, cap, CostModel.from_config("linear"))


def test_problems_are_reported_together() -> None:
    with pytest.raises(PlanError) as caught:
        plan_minibatch("lb_mini", [3, 99, 0], 0, 8, CostModel.from_config("linear"), ["a", "b"])
    message = str(caught.value)
    assert all(part in message for part in ("world_size is 0", "2 sample ids for 3 lengths", "#2 (0)", "#1 (99 tokens)"))
