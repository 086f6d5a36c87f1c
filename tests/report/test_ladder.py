"""The ladder's formulas, on tables small enough to add up by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.errors import DataError
from primus_odc.report.ladder import free_ms, lockstep_ms, split_ladder

PADDED = [[10.0, 40.0], [30.0, 20.0]]
BALANCED = [[50.0], [20.0, 10.0, 10.0]]


def test_lockstep_adds_the_slowest_of_every_microbatch() -> None:
    assert lockstep_ms(PADDED) == 30 + 40


def test_free_is_the_longest_rank() -> None:
    assert free_ms(PADDED) == 50
    assert free_ms(BALANCED) == 50
    assert free_ms([[], [7.0]]) == 7
    assert free_ms([[], []]) == 0


def test_lockstep_refuses_unequal_counts() -> None:
    with pytest.raises(DataError, match=r"\[1, 3\]"):
        lockstep_ms(BALANCED)


def test_split_by_hand() -> None:
    """nccl_pad 100 = 5 optimizer + 70 lockstep + 25 overhead; odc_pad 62 = 5 + 50 + 7; odc_nopad 58 = 5 + 44 + 9."""
    split = split_ladder(
        step_ms={"nccl_pad": [100.0], "odc_pad": [62.0], "odc_nopad": [58.0]},
        padded=[PADDED],
        balanced=[[[44.0], [40.0, 4.0]]],
        optimizer_ms={"nccl_pad": [5.0], "odc_pad": [5.0], "odc_nopad": [5.0]},
        padded_source="odc_pad",
    )
    assert (split.lockstep_ms, split.free_padded_ms, split.free_balanced_ms) == (70, 50, 44)
    assert split.waiting.ms == 20
    assert split.library.ms == 100 - 62 - 20
    assert split.plan.ms == 6
    assert split.plan_rest.ms == 62 - 58 - 6
    assert split.overhead_ms == {"nccl_pad": 25, "odc_pad": 7, "odc_nopad": 9}


def test_split_takes_medians_over_steps() -> None:
    """Waiting is 1, 5 and 9 ms in the three steps, hence 5 with quartiles 3 and 7; a missing optimizer counts as 0."""
    padded = [[[10.0, 10.0 - gap], [10.0 - gap, 10.0]] for gap in (1.0, 9.0, 5.0)]
    split = split_ladder(
        step_ms={"nccl_pad": [30.0, 31.0, 90.0], "odc_pad": [20.0, 20.0, 20.0], "odc_nopad": [21.0, 21.0, 21.0]},
        padded=padded,
        balanced=padded,
        optimizer_ms={},
        padded_source="nccl_pad",
    )
    assert (split.waiting.ms, split.waiting.quartiles) == (5, [3, 7])
    # 30 - 20 - 1, 31 - 20 - 9 and 90 - 20 - 5; of medians it would be 31 - 20 - 5.
    assert (split.library.ms, split.library.quartiles) == (9, [5.5, 37])
    assert split.plan.ms == 0
    assert (split.plan_rest.ms, split.plan_rest.quartiles) == (-1, [-1, -1])
    assert split.overhead_ms["nccl_pad"] == 11


@settings(max_examples=50)
@given(
    st.integers(1, 4).flatmap(lambda count: st.lists(st.lists(st.floats(0, 1e3), min_size=count, max_size=count), min_size=1, max_size=5))
)
def test_waiting_is_never_negative(table: list[list[float]]) -> None:
    assert lockstep_ms(table) - free_ms(table) >= -1e-9 * lockstep_ms(table)
