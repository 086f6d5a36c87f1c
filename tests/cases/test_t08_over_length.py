"""T8: a sample longer than the cap is an error at plan time that names the sample, its length, the cap, and the two ways out."""

from __future__ import annotations

import pytest

from primus_odc.errors import PlanError
from primus_odc.planning import POLICIES, CostModel, PlanAhead, Policy, plan_minibatch

LINEAR = CostModel.from_config("linear")


@pytest.mark.parametrize("policy", POLICIES)
def test_refused_with_all_that_is_needed_to_go_on(policy: Policy) -> None:
    with pytest.raises(PlanError) as caught:
        plan_minibatch(policy, [10, 4097, 4096], 2, 4096, LINEAR, ["short", "chat-17", "fits"])
    message = str(caught.value)
    for part in ("chat-17 (4097 tokens)", "cap of 4096", "`max_tokens_per_microbatch` to at least 4097", "`over_length: truncate`"):
        assert part in message
    assert "short" not in message and "fits" not in message


def test_at_the_cap_is_not_over() -> None:
    assert plan_minibatch("lb_mini", [4096, 4096], 2, 4096, LINEAR).counts == (1, 1)


def test_several_at_once_and_the_list_is_cut() -> None:
    names = [f"doc{i:02}" for i in range(40)]
    with pytest.raises(PlanError) as caught:
        plan_minibatch("lb_micro", [100 + i for i in range(40)], 2, 90, LINEAR, names)
    message = str(caught.value)
    assert "40 samples are longer" in message and "doc00 (100 tokens), doc01 (101 tokens)" in message and "and 32 more" in message
    assert "doc08" not in message and "to at least 139" in message


def test_the_error_reaches_the_step_through_background_planning() -> None:
    batches = [[5, 6], [5, 99]]
    with PlanAhead(lambda step: plan_minibatch("lb_mini", batches[step], 2, 10, LINEAR, ["a", "b"]), first_step=0, timeout_s=20) as plans:
        assert plans.get(0).counts == (1, 1)
        with pytest.raises(PlanError, match=r"b \(99 tokens\)"):
            plans.get(1)
