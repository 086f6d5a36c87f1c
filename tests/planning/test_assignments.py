"""Other plans of a minibatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_odc.errors import PlanError
from primus_odc.planning import CostModel, plan_minibatch
from primus_odc.planning.assignments import STRETCH, plan_assignment
from primus_odc.planning.plan import POLICIES, MinibatchPlan, Policy

MODEL = CostModel(name="test", per_token=1.0, per_token_squared=1e-3)


@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    ranks=st.integers(1, 4),
    number=st.integers(1, 4),
)
def test_every_assignment_is_another_plan_of_these_samples(policy: Policy, lengths: list[int], ranks: int, number: int) -> None:
    plans: list[MinibatchPlan] = []
    for assignment in range(number + 1):
        try:
            plans.append(
                plan_assignment(assignment, policy, lengths, ranks, 100, MODEL)
            )  # a MinibatchPlan checks itself: all once, the cap
        except PlanError as error:
            assert f"has no more than {len(plans)} that differ" in str(error)
            break
    assert plans[0] == plan_minibatch(policy, lengths, ranks, 100, MODEL)
    assert len({plan.microbatches for plan in plans}) == len(plans)
    assert all(plan.lengths == tuple(lengths) and plan.policy == policy and plan.world_size == ranks for plan in plans)
    assert plans[-1] == plan_assignment(len(plans) - 1, policy, lengths, ranks, 100, MODEL)


@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro"])
def test_samples_that_are_alone_change_their_place(policy: Policy) -> None:
    lengths = [60, 70, 80, 90]  # no two fit together
    plans = [plan_assignment(number, policy, lengths, 2, 100, MODEL) for number in range(3)]
    assert len({plan.microbatches for plan in plans}) == 3


@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro", "localsort"])
def test_samples_as_long_as_the_cap_change_places(policy: Policy) -> None:
    """They cannot be taken to be longer, and no two fit together."""
    plans = [plan_assignment(number, policy, [100] * 8, 2, 100, MODEL) for number in range(3)]
    assert len({plan.microbatches for plan in plans}) == 3


def test_where_there_are_no_more_it_says_so() -> None:
    with pytest.raises(PlanError, match=r"assignment 1 of 1 samples to 2 ranks .* no more than 1 that differ"):
        plan_assignment(1, "lb_mini", [50], 2, 100, MODEL)


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
