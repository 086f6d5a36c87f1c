"""Other plans of a minibatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_odc.planning import CostModel, plan_minibatch
from primus_odc.planning.assignments import STRETCH, plan_assignment
from primus_odc.planning.plan import POLICIES, Policy

MODEL = CostModel(name="test", per_token=1.0, per_token_squared=1e-3)


@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    assignment=st.integers(1, 5),
)
def test_every_assignment_is_a_plan_of_these_samples(policy: Policy, lengths: list[int], ranks: int, assignment: int) -> None:
    plan = plan_assignment(assignment, policy, lengths, ranks, 100, MODEL)  # a MinibatchPlan checks itself: every sample once, the cap
    assert plan.lengths == tuple(lengths) and plan.policy == policy and plan.world_size == ranks
    assert plan == plan_assignment(assignment, policy, lengths, ranks, 100, MODEL)


@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro"])
def test_assignments_differ_in_what_is_together_and_stay_balanced(policy: Policy) -> None:
    lengths = [7 + (37 * i) % 83 for i in range(48)]
    plain = plan_minibatch(policy, lengths, 4, 100, MODEL)
    assert plan_assignment(0, policy, lengths, 4, 100, MODEL) == plain
    others = [plan_assignment(number, policy, lengths, 4, 100, MODEL) for number in (1, 2)]
    together = [{bucket for rank in plan.microbatches for bucket in rank} for plan in (plain, *others)]
    shared = [len(together[0] & together[1]), len(together[0] & together[2]), len(together[1] & together[2])]
    assert max(shared) <= 2 / 3 * len(together[0])  # samples alone in their microbatch stay so
    heaviest = plain.rank_costs(MODEL).max()
    assert all(plan.rank_costs(MODEL).max() <= heaviest * (1 + STRETCH) for plan in others)
