"""Split samples into k parts so that the costliest part costs as little as possible.

Karmarkar-Karp's largest differencing method keeps partial solutions, each a k-way split of some samples, and repeatedly joins the two whose
parts differ most: the costliest part of one is laid onto the cheapest of the other. What difference is left at the end is then refined by
moving and swapping samples between the costliest part and the others. The result is never worse than longest-first-to-the-lightest-part
(LPT), because that is computed too and the better one is taken.

A partial solution stores only its non-empty parts, in ascending order. Joining a single sample is then one binary search instead of k
additions, and at most n / k joins touch k parts, so that n samples take O(n log k) steps.

Costs are integers here (:func:`integer_costs`): sums do not depend on their order, hence every rank on every machine finds the same split.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from primus_odc.planning.refine import refine

IntArray = npt.NDArray[np.int64]
Parts = list[list[int]]

_COST_BITS = 40  # 4,096 samples of the largest cost still add up to less than 2**53
_Slot = tuple[int, int, list[int]]  # (cost, first sample: breaks ties, samples)


def integer_costs(costs: npt.ArrayLike, *also: float) -> tuple[IntArray, list[int]]:
    """Round costs to integers on a common power-of-two scale with 40 bits for the largest.

    Args:
        costs: [n] finite, not negative.
        also: further costs to be put on the same scale.

    Returns:
        ``costs`` as int64 [n], and ``also`` as ints.
    """
    values = np.asarray(costs, dtype=np.float64)
    largest = max(float(values.max(initial=0.0)), *also, 0.0)
    _, exponent = np.frexp(largest)
    shift = _COST_BITS - int(exponent)
    return np.rint(np.ldexp(values, shift)).astype(np.int64), [int(np.rint(np.ldexp(value, shift))) for value in also]


def descending(costs: Sequence[int] | IntArray) -> list[int]:
    """Sample indices from the costliest to the cheapest; equal costs keep their order."""
    order: list[int] = np.argsort(-np.asarray(costs), kind="stable").tolist()
    return order


def longest_first(costs: Sequence[int], k: int) -> Parts:
    """LPT: each sample, costliest first, goes to the part that is cheapest so far."""
    parts: Parts = [[] for _ in range(k)]
    heap = [(0, part) for part in range(k)]
    for sample in descending(costs):
        load, part = heap[0]
        parts[part].append(sample)
        heapq.heapreplace(heap, (load + costs[sample], part))
    return parts


def largest_differencing(costs: Sequence[int], k: int) -> Parts:
    """Karmarkar-Karp's k-way largest differencing method, without refinement."""
    # An entry is (-spread, -number of parts, sequence number, slots ascending). With fewer than k slots the others are empty, so the
    # spread is the costliest slot; with k slots it is the costliest less the cheapest, and only differences to the cheapest matter.
    heap: list[tuple[int, int, int, list[_Slot]]] = [(-costs[i], -1, i, [(costs[i], i, [i])]) for i in descending(costs)]
    for sequence in range(len(costs), 2 * len(costs) - 1):
        slots = _join(heapq.heappop(heap)[3], heap[0][3], k)
        spread = slots[-1][0] - (slots[0][0] if len(slots) == k else 0)
        heapq.heapreplace(heap, (-spread, -len(slots), sequence, slots))
    parts = [slot[2] for slot in heap[0][3]] if heap else []
    return parts + [[] for _ in range(k - len(parts))]


def _join(into: list[_Slot], other: list[_Slot], k: int) -> list[_Slot]:
    """Lay the costliest slots of one partial solution onto the cheapest of another; both arguments are used up."""
    if len(other) > len(into):
        into, other = other, into
    empty = k - len(into)
    if len(other) <= empty:
        if len(other) == 1:
            insort(into, other[0])
            return into
        return sorted(into + other)
    base = other[0][0] if len(other) == k else 0
    joined = other[len(other) - empty :] if empty else []
    rest = other[len(other) - empty - 1 :: -1] if empty < len(other) else []
    for position, (cost, _, samples) in enumerate(rest):
        under = into[position]
        under[2].extend(samples)
        joined.append((under[0] + cost - base, under[1], under[2]))
    if len(joined) == 1:
        del into[0]
        insort(into, joined[0])
        return into
    return sorted(into[len(rest) :] + joined)


def lower_bound(costs: Sequence[int], k: int) -> int:
    """A cost that no split into k parts can beat: the mean part, the costliest sample, and the pair that must share a part."""
    ordered = sorted(costs, reverse=True)
    shared = ordered[k - 1] + ordered[k] if len(ordered) > k else 0
    return max(-(-sum(ordered) // k), ordered[0] if ordered else 0, shared)


def part_loads(costs: Sequence[int], parts: Parts) -> list[int]:
    """Cost of every part."""
    return [sum(costs[i] for i in part) for part in parts]


def partition(costs: Sequence[int], k: int) -> Parts:
    """Split samples into k parts with the smallest cost of the costliest part that was found.

    Args:
        costs: [n] integers, not negative; see :func:`integer_costs`.
        k: number of parts, at least 1. With fewer samples than parts some parts stay empty.

    Returns:
        k lists of indices into ``costs``; every index is in exactly one.
    """
    lpt = longest_first(costs, k)
    differenced = largest_differencing(costs, k)
    best = min(differenced, lpt, key=lambda parts: max(part_loads(costs, parts)))
    return refine(best, costs, goal=lower_bound(costs, k))
