"""Splits against brute force, LPT written independently, and the properties of a split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.planning.partition import integer_costs, largest_differencing, longest_first, lower_bound, part_loads, partition
from primus_odc.planning.refine import refine

COSTS = st.lists(st.one_of(st.integers(0, 10), st.integers(0, 2**40)), max_size=40)


def naive_lpt(costs: list[int], k: int) -> int:
    loads = [0] * k
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads)


def optimum(costs: list[int], k: int) -> int:
    best = sum(costs)
    for choice in itertools.product(range(k), repeat=len(costs)):
        loads = [0] * k
        for cost, part in zip(costs, choice, strict=True):
            loads[part] += cost
        best = min(best, max(loads))
    return best


@settings(max_examples=200)
@given(COSTS, st.integers(1, 50))
def test_every_sample_once_and_never_worse_than_lpt(costs: list[int], k: int) -> None:
    parts = partition(costs, k)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    heaviest = max(part_loads(costs, parts))
    assert lower_bound(costs, k) <= heaviest <= naive_lpt(costs, k)
    for split in (largest_differencing(costs, k), longest_first(costs, k)):
        assert sorted(itertools.chain(*split)) == list(range(len(costs)))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7), st.integers(2, 3))
def test_near_the_optimum(costs: list[int], k: int) -> None:
    best = optimum(costs, k)
    assert lower_bound(costs, k) <= best
    heaviest = max(part_loads(costs, partition(costs, k)))
    assert best <= heaviest <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


def test_known_example_of_differencing() -> None:
    # Textbook example: differencing ends at a difference of 2 for two parts, longest-first at 4.
    costs = [8, 7, 6, 5, 4]
    assert sorted(part_loads(costs, largest_differencing(costs, 2))) == [14, 16]
    assert sorted(part_loads(costs, longest_first(costs, 2))) == [13, 17]
    assert sorted(part_loads(costs, partition(costs, 2))) == [15, 15], "refinement finds the perfect split"


def dense_differencing(costs: list[int], k: int) -> int:
    """Largest differencing with all k parts written out; distinct spreads only, so that ties play no part. Returns the final spread."""
    nodes = [sorted([0] * (k - 1) + [cost]) for cost in costs]
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[-1] - node[0])
        first, second = nodes.pop(), nodes.pop()
        joined = sorted(a + b for a, b in zip(first, reversed(second), strict=True))
        nodes.append([value - joined[0] for value in joined])
    return nodes[0][-1] - nodes[0][0]


@pytest.mark.parametrize("k", [2, 3, 7, 16])
def test_sparse_differencing_equals_the_dense_one(k: int) -> None:
    generator = np.random.default_rng(k)
    for count in (1, 5, 40, 200):
        costs = generator.integers(1, 2**38, count).tolist()
        loads = part_loads(costs, largest_differencing(costs, k))
        assert max(loads) - min(loads) == dense_differencing(costs, k)


@settings(max_examples=100)
@given(st.data())
def test_refine_never_breaks_the_token_cap_or_gets_worse(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 6))
    tokens = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=24))
    parts = longest_first(tokens, k)
    costs = data.draw(st.lists(st.integers(0, 1000), min_size=len(tokens), max_size=len(tokens)))
    cap = max(part_loads(tokens, parts)) + data.draw(st.integers(0, 10))
    refined = refine(parts, costs, goal=0, tokens=tokens, max_tokens=cap)
    assert sorted(itertools.chain(*refined)) == list(range(len(tokens)))
    assert max(part_loads(tokens, refined)) <= cap
    assert max(part_loads(costs, refined)) <= max(part_loads(costs, parts))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 60))
def test_refine_counts_begun_microbatches(tokens: list[int], k: int, fixed: int) -> None:
    def slowest(parts: list[list[int]]) -> int:
        return max(load + fixed * -(-load // 20) for load in part_loads(tokens, parts))

    parts = [list(range(len(tokens)))] + [[] for _ in range(k - 1)]
    refined = refine(parts, tokens, goal=0, tokens=tokens, max_tokens=20, cost_per_max_tokens=fixed)
    assert sorted(itertools.chain(*refined)) == list(range(len(tokens)))
    assert slowest(refined) <= slowest(parts)


def test_integer_costs_keep_tokens_exact_and_a_common_scale() -> None:
    values, (fixed, zero) = integer_costs([1, 3, 65536], 16384.0, 0.0)
    assert values[2] == 65536 * values[0] and values[1] == 3 * values[0] and fixed == 16384 * values[0] and zero == 0
    assert 2**39 <= values.max() <= 2**40
    assert integer_costs([0.0, 0.0])[0].tolist() == [0, 0]
