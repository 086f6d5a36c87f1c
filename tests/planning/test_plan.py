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


def test_dealing_moves_microbatches_to_other_ranks_and_changes_no_count() -> None:
    plan = MinibatchPlan(
        policy="lb_mini", lengths=tuple(range(1, 9)), max_tokens=9, microbatches=(((0,), (1,), (2, 5)), ((3,), (4,)), (), ((6,), (7,)))
    )
    assert plan.dealt(0) is plan
    dealt = [plan.dealt(seed) for seed in range(1, 20)]
    assert len({other.digest() for other in dealt}) > 5 and dealt[0].digest() == plan.dealt(1).digest()
    for other in dealt:
        assert other.counts == plan.counts
        for place in (1, 2, 3):  # from the last, which is a rank's costliest
            last = [sorted(rank[-place] for rank in p.microbatches if len(rank) >= place) for p in (plan, other)]
            assert last[0] == last[1]
