"""Pack samples into microbatches: as few as possible under the token cap, then of similar cost.

The number comes first. It is at least the tokens over the cap, and at least the number of samples longer than half of it; where the plain
heuristics need more than that, a bounded exhaustive search tries to prove them wrong. Each further microbatch has a fixed cost, and under
collectives it costs all ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from primus_odc.planning.partition import Parts, descending, largest_differencing, lower_bound, part_loads
from primus_odc.planning.refine import refine

_SEARCH_STEPS = 4096
_SEARCH_SAMPLES = 32  # with more samples the heuristics are rarely beaten, and the search never ends
_PUT_ASIDE = 32


def fewest_possible(tokens: Sequence[int], max_tokens: int) -> int:
    """Number of microbatches that no packing can go below; 0 without samples."""
    return max(-(-sum(tokens) // max_tokens), sum(2 * length > max_tokens for length in tokens))


def best_fit(tokens: Sequence[int], max_tokens: int) -> Parts:
    """Best fit decreasing: each sample, longest first, goes to the fullest microbatch that still has room."""
    bins: Parts = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for sample in descending(tokens):
        length = tokens[sample]
        position = bisect_left(room, (length, 0))
        if position == len(room):
            free, target = max_tokens, len(bins)
            bins.append([])
        else:
            free, target = room.pop(position)
        bins[target].append(sample)
        insort(room, (free - length, target))
    return bins


def cheapest_fit(costs: Sequence[int], tokens: Sequence[int], max_tokens: int, k: int) -> Parts | None:
    """Longest first to the cheapest of k microbatches that has room; ``None`` if a sample finds no room in the cheapest ones."""
    bins: Parts = [[] for _ in range(k)]
    heap = [(0, part, 0) for part in range(k)]  # (cost, bin, tokens)
    for sample in descending(costs):
        aside: list[tuple[int, int, int]] = []
        while heap and heap[0][2] + tokens[sample] > max_tokens and len(aside) < _PUT_ASIDE:
            aside.append(heapq.heappop(heap))
        if not heap or heap[0][2] + tokens[sample] > max_tokens:
            return None
        load, part, filled = heap[0]
        bins[part].append(sample)
        heapq.heapreplace(heap, (load + costs[sample], part, filled + tokens[sample]))
        for entry in aside:
            heapq.heappush(heap, entry)
    return bins


def search(tokens: Sequence[int], max_tokens: int, k: int, steps: int) -> Parts | None:
    """Depth-first search for a packing into k microbatches; ``None`` if there is none or it was not found in so many steps."""
    order = descending(tokens)
    shortest = tokens[order[-1]]
    room = [max_tokens] * k
    chosen: list[int] = []
    slack = k * max_tokens - sum(tokens)

    def place(depth: int, slack: int) -> bool:
        nonlocal steps
        if depth == len(order):
            return True
        length = tokens[order[depth]]
        tried = set()
        for part in range(k):
            free = room[part] - length
            if free < 0 or free in tried or steps <= 0:
                continue
            tried.add(free)
            steps -= 1
            wasted = free if free < shortest else 0
            if wasted > slack:
                continue
            room[part] = free
            chosen.append(part)
            if place(depth + 1, slack - wasted):
                return True
            chosen.pop()
            room[part] = free + length
        return False

    if slack < 0 or len(order) > _SEARCH_SAMPLES or not place(0, slack):
        return None
    bins: Parts = [[] for _ in range(k)]
    for sample, part in zip(order, chosen, strict=True):
        bins[part].append(sample)
    return bins


def pack(
    costs: Sequence[int],
    tokens: Sequence[int],
    max_tokens: int,
    *,
    multiple: int = 1,
    thorough: bool = True,
    share: int = 1,
) -> Parts:
    """Pack samples into the fewest microbatches found, of similar cost.

    Args:
        costs: [n] integers.
        tokens: [n], none above ``max_tokens``.
        max_tokens: most tokens of one microbatch.
        multiple: the number of microbatches is rounded up to a multiple of this; some may then be empty.
        thorough: balance the costs as well as can be; else only roughly, which is enough where nobody waits for a single microbatch.
        share: this call may use 1 / share of the work that one plan is worth.

    Returns:
        Lists of indices, each within the cap.
    """
    if not costs:
        return []
    k = -(-fewest_possible(tokens, max_tokens) // multiple) * multiple
    packed = cheapest_fit(costs, tokens, max_tokens, k)
    rough = packed is None
    if packed is None:
        packed = best_fit(tokens, max_tokens)
        while len(packed) > k:
            closer = search(tokens, max_tokens, k, _SEARCH_STEPS // share)
            if closer is None:
                k += multiple
                closer = cheapest_fit(costs, tokens, max_tokens, k)
            packed = packed if closer is None else closer
    packed = packed + [[] for _ in range(k - len(packed))]
    if thorough:
        differenced = largest_differencing(costs, k)
        fits = max(part_loads(tokens, differenced)) <= max_tokens
        if fits and max(part_loads(costs, differenced)) <= max(part_loads(costs, packed)):
            packed = differenced
    if thorough or rough:
        packed = refine(packed, costs, goal=lower_bound(costs, k), tokens=tokens, max_tokens=max_tokens, share=share)
    return packed
