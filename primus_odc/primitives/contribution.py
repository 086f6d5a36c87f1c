"""What one reduction of FSDP2's brings: gradients of some of a group's parameters, one row per owner.

A microbatch that leaves parameters unused makes FSDP2 reduce a shorter flat tensor, in which everything behind the first missing
parameter stands at another place than in the full layout. A contribution therefore names the parameters it holds, and is unpacked
into the full, static layout of the group here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from primus_odc.primitives.spec import GroupSpec
from primus_odc.primitives.sums import add_into


@dataclass(frozen=True)
class Contribution:
    """``rows``: shape ``[shards, n]``, row o for owner o, any float dtype. ``params``: indices (into ``GroupSpec.params``) of the
    parameters whose padded gradient shards stand side by side in each row, in flat order; ``n`` is the sum of their ``padded_numel``."""

    rows: torch.Tensor
    params: tuple[int, ...]

    def runs(self, group: GroupSpec) -> list[tuple[int, int, int]]:
        """``(offset in the full layout, offset in a row, numel)``, neighbours merged."""
        runs: list[tuple[int, int, int]] = []
        cursor = 0
        for i in self.params:
            p = group.params[i]
            if runs and runs[-1][0] + runs[-1][2] == p.grad_offset:
                full, row, numel = runs[-1]
                runs[-1] = (full, row, numel + p.padded_numel)
            else:
                runs.append((p.grad_offset, cursor, p.padded_numel))
            cursor += p.padded_numel
        return runs


class UnshardedSum:
    """Running sum of contributions over one epoch in the full layout: ``buffer`` is ``[shards, grad_numel]``.

    The first contribution of a parameter overwrites what an older epoch left, later ones add; :meth:`complete` zeroes what received
    nothing. Nothing is cleared up front, so an epoch costs no pass over memory that a microbatch will overwrite anyway.
    """

    def __init__(self, group: GroupSpec, buffer: torch.Tensor, alone: Callable[[], bool] = lambda: False) -> None:
        """``alone``: whether nothing is computed beside an addition that is made now."""
        self.group = group
        self.buffer = buffer
        self._alone = alone
        self._written: set[int] = set()
        self._all = tuple(i for i, _ in group.trainable())

    def add(self, contribution: Contribution) -> None:
        """Add one contribution (cast to the buffer's dtype)."""
        fresh = self._written.isdisjoint(contribution.params)
        if fresh or self._written.issuperset(contribution.params):
            for full, row, numel in contribution.runs(self.group):
                self._apply(contribution.rows, full, row, numel, fresh)
        else:
            cursor = 0
            for i in contribution.params:
                p = self.group.params[i]
                self._apply(contribution.rows, p.grad_offset, cursor, p.padded_numel, i not in self._written)
                cursor += p.padded_numel
        self._written.update(contribution.params)

    def _apply(self, rows: torch.Tensor, full: int, row: int, numel: int, fresh: bool) -> None:
        target, source = self.buffer[:, full : full + numel], rows[:, row : row + numel]
        add_into(target, source, fresh=fresh, alone=self._alone())

    def complete(self) -> None:
        """Zero the parameters that received nothing since :meth:`reset`."""
        for i in self._all:
            if i not in self._written:
                p = self.group.params[i]
                self.buffer[:, p.grad_offset : p.grad_offset + p.padded_numel].zero_()
        self._written.update(self._all)

    def reset(self) -> None:
        """Start a new epoch: the next contribution of each parameter overwrites."""
        self._written.clear()


def split_pieces(group: GroupSpec, contribution: Contribution, owner: int, max_numel: int) -> Sequence[tuple[int, torch.Tensor]]:
    """The row of ``owner`` cut into ``(offset in the full layout, 1-D tensor)`` of at most ``max_numel`` elements."""
    pieces: list[tuple[int, torch.Tensor]] = []
    for full, row, numel in contribution.runs(group):
        for start in range(0, numel, max_numel):
            stop = min(start + max_numel, numel)
            pieces.append((full + start, contribution.rows[owner, row + start : row + stop]))
    return pieces
