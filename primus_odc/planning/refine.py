"""Improve a split by moving one sample, or swapping two, between the costliest part and the others.

Every round looks at all moves and swaps of the costliest part at once (one matrix: its samples against everybody else's, and against
"nothing", which makes a move) and does the one that leaves the costlier of the two parts involved cheapest. It ends when none helps, when
the goal is met, or when the work limit is reached. The limit counts matrix elements, not seconds, so that all ranks stop at the same point.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORK_LIMIT = 1_000_000
_ROUND_WORK = 4000  # what a round costs however small its matrix is
_NEVER = np.iinfo(np.int64).max
_TOLERANCE = 1e-4  # of the goal: below what a step time can resolve

_Array = npt.NDArray[np.int64]


def refine(
    parts: list[list[int]],
    costs: Sequence[int],
    *,
    goal: int,
    tokens: Sequence[int] | None = None,
    max_tokens: int = 1,
    cost_per_max_tokens: int | None = None,
    share: int = 1,
) -> list[list[int]]:
    """Lower the cost of the costliest part; it never gets higher.

    Args:
        parts: k lists of indices into ``costs``.
        costs: [n] integers.
        goal: stop at a costliest part this cheap, within 1e-4.
        tokens: [n] tokens per sample; ``None`` for no token limit.
        max_tokens: with ``tokens``: no part may get more tokens than this, unless ``cost_per_max_tokens`` is given.
        cost_per_max_tokens: a part may hold any number of tokens, and pays this for every ``max_tokens`` begun: the fixed cost of the
            microbatches that it will at least need.
        share: this call may use 1 / share of the work limit.

    Returns:
        New lists, samples ascending.
    """
    n, k = len(costs), len(parts)
    # Column n + p stands for "nothing" in part p: swapping with it is a move.
    cost = np.array([*costs, *[0] * k], dtype=np.int64)
    size = np.array([*tokens, *[0] * k], dtype=np.int64) if tokens is not None else np.zeros(n + k, dtype=np.int64)
    part_of = np.arange(-n, k)
    for part, samples in enumerate(parts):
        part_of[samples] = part
    load, fill = np.zeros(k, dtype=np.int64), np.zeros(k, dtype=np.int64)
    np.add.at(load, part_of, cost)
    np.add.at(fill, part_of, size)

    def total(load: _Array, fill: _Array) -> _Array:
        return load + cost_per_max_tokens * -(-fill // max_tokens) if cost_per_max_tokens else load

    work = 0
    while True:
        totals = total(load, fill)
        heavy = int(totals.argmax())
        rows = np.flatnonzero(part_of[:n] == heavy)
        columns = np.flatnonzero(part_of != heavy)
        work += _ROUND_WORK + rows.size * columns.size
        if totals[heavy] <= goal * (1 + _TOLERANCE) or work * share > _WORK_LIMIT or columns.size == 0:
            break
        given_cost = cost[rows, None] - cost[columns]
        given_size = size[rows, None] - size[columns]
        other = part_of[columns]
        heavy_fill, other_fill = fill[heavy] - given_size, fill[other] + given_size
        worst = np.maximum(total(load[heavy] - given_cost, heavy_fill), total(load[other] + given_cost, other_fill))
        if cost_per_max_tokens is None:
            worst[np.maximum(heavy_fill, other_fill) > max_tokens] = _NEVER
        row, column = divmod(int(worst.argmin()), columns.size)
        if worst[row, column] >= totals[heavy]:
            break
        target = int(other[column])
        for values, given in ((load, given_cost), (fill, given_size)):
            values[heavy] -= given[row, column]
            values[target] += given[row, column]
        part_of[rows[row]] = target
        if columns[column] < n:
            part_of[columns[column]] = heavy
    refined: list[list[int]] = [[] for _ in range(k)]
    for sample, part in enumerate(part_of[:n].tolist()):
        refined[part].append(sample)
    return refined
