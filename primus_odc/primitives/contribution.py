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

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which a sum of one contribution may stay."""


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

    The first contribution of all may be made in place (:meth:`place`). If it is the only one it stays in its own dtype, in the first half
    of the buffer: a copy less, and half the bytes to pull. The sum is the same, since the buffer's dtype has every number of a narrower
    one.
    """

    def __init__(self, group: GroupSpec, buffer: torch.Tensor, alone: Callable[[], bool] = lambda: False) -> None:
        """``alone``: whether nothing is computed beside an addition that is made now."""
        self.group = group
        self.buffer = buffer
        self._alone = alone
        self._narrow: torch.dtype | None = None
        self._written: set[int] = set()
        self._all = tuple(i for i, _ in group.trainable())

    def place(self, dtype: torch.dtype, *, only: bool) -> torch.Tensor | None:
        """Where the next contribution may be written before :meth:`add`: ``[shards * grad_numel]`` of ``dtype``; None: nowhere.

        Args:
            dtype: the contribution's.
            only: whether no other is to be expected in this epoch.
        """
        flat = self.buffer.view(-1)
        if self._written:
            return None
        if dtype == flat.dtype:
            return flat
        return flat.view(dtype)[: flat.numel()] if only and dtype in NARROW and flat.dtype == torch.float32 else None

    def add(self, contribution: Contribution) -> None:
        """Add one contribution (cast to the buffer's dtype)."""
        if contribution.rows.data_ptr() == self.buffer.data_ptr() and contribution.rows.numel():
            self._narrow = contribution.rows.dtype if contribution.rows.dtype != self.buffer.dtype else None
            self._written.update(contribution.params)
            return
        if self._narrow is not None:
            flat = self.buffer.view(-1)
            flat.copy_(flat.view(self._narrow)[: flat.numel()].clone())
            self._narrow = None
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

    def complete(self) -> torch.dtype | None:
        """End the epoch: zero the parameters that received nothing; the next contribution of each parameter overwrites.

        Returns:
            The dtype of what lies in the first half of the buffer instead of the sum in its own; else None.
        """
        for i in self._all:
            if i not in self._written:
                p = self.group.params[i]
                self.buffer[:, p.grad_offset : p.grad_offset + p.padded_numel].zero_()
        self._written.clear()
        narrow, self._narrow = self._narrow, None
        return narrow


def split_pieces(group: GroupSpec, contribution: Contribution, owner: int, max_numel: int) -> Sequence[tuple[int, torch.Tensor]]:
    """The row of ``owner`` cut into ``(offset in the full layout, 1-D tensor)`` of at most ``max_numel`` elements."""
    pieces: list[tuple[int, torch.Tensor]] = []
    for full, row, numel in contribution.runs(group):
        for start in range(0, numel, max_numel):
            stop = min(start + max_numel, numel)
            pieces.append((full + start, contribution.rows[owner, row + start : row + stop]))
    return pieces
