"""Packing: the cap is kept, no microbatch too many where that can be checked, costs balanced."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.planning.packing import best_fit, fewest_possible, pack, search
from primus_odc.planning.partition import part_loads

CAP = 20


def fewest_bins(tokens: list[int]) -> int:
    """Exact: dynamic programme over subsets, (bins, tokens in the last bin) smallest first."""
    best = {0: (0, CAP)}
    for mask in range(1, 1 << len(tokens)):
        options = []
        for i, length in enumerate(tokens):
            if mask >> i & 1:
                bins, filled = best[mask & ~(1 << i)]
                options.append((bins, filled + length) if filled + length <= CAP else (bins + 1, length))
        best[mask] = min(options)
    return best[(1 << len(tokens)) - 1][0]


@settings(max_examples=150)
@given(st.lists(st.integers(1, CAP), min_size=1, max_size=9))
def test_fewest_microbatches(tokens: list[int]) -> None:
    exact = fewest_bins(tokens)
    assert fewest_possible(tokens, CAP) <= exact
    costs = [length * length for length in tokens]
    for thorough in (True, False):
        packed = pack(costs, tokens, CAP, thorough=thorough)
        assert len(packed) == exact
        assert sorted(itertools.chain(*packed)) == list(range(len(tokens)))
        assert max(part_loads(tokens, packed)) <= CAP


@settings(max_examples=100)
@given(st.lists(st.integers(1, CAP), min_size=1, max_size=80), st.integers(1, 9))
def test_any_number_of_samples_and_multiple(tokens: list[int], multiple: int) -> None:
    packed = pack(tokens, tokens, CAP, multiple=multiple)
    assert len(packed) % multiple == 0
    assert sorted(itertools.chain(*packed)) == list(range(len(tokens)))
    assert max(part_loads(tokens, packed)) <= CAP
    heuristic = best_fit(tokens, CAP)
    assert max(part_loads(tokens, heuristic)) <= CAP
    assert len(packed) <= -(-len(heuristic) // multiple) * multiple


def test_search_beats_best_fit() -> None:
    # Best fit needs 4 microbatches of 20; 3 are enough: 10+6+4, 10+5+5, 8+7+5.
    tokens = [10, 10, 8, 7, 6, 5, 5, 5, 4]
    assert sum(tokens) == 3 * CAP
    found = search(tokens, CAP, 3, 4096)
    assert found is not None and max(part_loads(tokens, found)) == CAP
    assert search(tokens, CAP, 2, 4096) is None


def test_costs_are_balanced_where_the_cap_allows() -> None:
    tokens = [8, 7, 6, 5, 4]
    assert sorted(part_loads(tokens, pack(tokens, tokens, CAP))) == [15, 15]
