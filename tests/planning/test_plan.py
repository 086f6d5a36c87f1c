"""What a plan refuses, counts and hashes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from primus_odc.errors import PlanError
from primus_odc.planning import CostModel, MinibatchPlan

PLAN = MinibatchPlan(policy="lb_micro", lengths=(5, 3, 7), max_tokens=8, microbatches=(((), (2,)), ((), (0, 1)), ((), ())))


def test_counts_and_costs() -> None:
    linear = CostModel.from_config("linear", microbatch_cost=10)
    assert PLAN.counts == (2, 2, 2) and PLAN.world_size == 3
    assert PLAN.rank_costs(linear).tolist() == [11 + 17, 11 + 18, 22]
    assert [costs.tolist() for costs in PLAN.microbatch_costs(linear)] == [[11, 17], [11, 18], [11, 11]]
    empty = replace(PLAN, policy="lb_mini", microbatches=(((2,),), ((0, 1),), ()))
    assert empty.counts == (1, 1, 0)
    np.testing.assert_array_equal(empty.rank_costs(linear), [17, 18, 0])


@pytest.mark.parametrize(
    ("microbatches", "message"),
    [
        ((((2,),), ((0,),)), "1 samples are not in exactly one microbatch .first: sample 1, 0 times"),
        ((((2, 0),), ((0, 1),)), "sample 0, 2 times"),
        ((((2,),), ((0, 1, 3),)), "1 indices lie outside the minibatch of 3 samples"),
        ((((2,),), ((0, 1, -1),)), "outside"),
        ((((0, 2),), ((1,),)), "microbatch 0 of rank 0 holds 12 tokens, more than the cap of 8"),
    ],
)
def test_invalid_plans_are_refused(microbatches: tuple[tuple[tuple[int, ...], ...], ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, microbatches=microbatches)


def test_digest_changes_with_every_part_of_the_plan() -> None:
    others = [
        replace(PLAN, policy="localsort"),
        replace(PLAN, lengths=(5, 2, 7)),
        replace(PLAN, max_tokens=9),
        replace(PLAN, microbatches=(((), (2,)), ((), (0, 1)))),
        replace(PLAN, microbatches=(((), (2,)), ((), ()), ((), (0, 1)))),
        replace(PLAN, microbatches=(((), (2,)), ((0,), (1,)), ((), ()))),
    ]
    digests = {plan.digest() for plan in others} | {PLAN.digest()}
    assert len(digests) == 7
    assert PLAN.digest() == replace(PLAN).digest() and len(PLAN.digest()) == 64
