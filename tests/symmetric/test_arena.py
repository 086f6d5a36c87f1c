from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_odc.symmetric.arena import ALIGNMENT, ArenaPlan, Region, align


@given(st.integers(0, 1 << 40), st.sampled_from([1, 8, 64, 256, 4096]))
def test_align_gives_the_next_multiple(nbytes: int, alignment: int) -> None:
    aligned = align(nbytes, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - nbytes < alignment


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_regions_are_aligned_ordered_and_disjoint(sizes: list[int]) -> None:
    plan = ArenaPlan()
    regions = [plan.add(str(i), n) for i, n in enumerate(sizes)]
    end = 0
    for region, nbytes in zip(regions, sizes, strict=True):
        assert region.offset % ALIGNMENT == 0
        assert region.offset >= end
        assert region.nbytes == nbytes
        end = region.offset + nbytes
    assert end <= plan.nbytes < end + ALIGNMENT


def test_region_names_are_unique() -> None:
    plan = ArenaPlan()
    assert plan.add("a", 10) == Region(0, 10)
    with pytest.raises(ValueError, match="'a' exists"):
        plan.add("a", 10)
