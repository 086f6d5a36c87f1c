"""(owner mode) What one rank pushes to owners: the rings' heads, and sums that wait for a slot (:mod:`primus_odc.primitives.protocol`).

A reduction runs inside backward and must not wait for an owner. So a piece that finds no free slot is kept: added to a sum in this rank's
own memory, one for each owner and group, which is pushed when there are slots again, the oldest first and before anything new. At worst,
with an owner that frees no slot at all, the sums kept are as large as those of ``local`` mode.

A host runs ahead of its device, where a push happens much later than it was queued, and no owner can add what is not there. So that this
does not look like an owner without free slots, the host stays at most half a ring ahead of its own device: it waits for its own ``head``,
which the device stores. What filled the slot it needs was then pushed half a ring ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from primus_odc.primitives.effects import Do, ReadWord, Steps, Store, Wait
from primus_odc.primitives.topology import DataPlane, Topology


@dataclass(slots=True)
class _Kept:
    """A sum that waits for slots: its number, its group, and how many of its parts are pushed."""

    entry: int
    group: int
    pushed: int = 0


class Pushes:
    """Attributes:
    owners: the other ranks of the shard group.
    sums_kept: how many sums had to be kept; only grows.
    """

    def __init__(self, topology: Topology, plane: DataPlane, slots: int) -> None:
        self.owners = [r for r in topology.peers if r != topology.rank]
        self.sums_kept = 0
        self._t, self._plane, self._slots = topology, plane, slots
        self._ahead = max(1, slots // 2)
        self._heads = dict.fromkeys(self.owners, 0)
        self._kept: dict[int, list[_Kept]] = {owner: [] for owner in self.owners}

    def keeps(self, group: int | None = None) -> bool:
        """Whether something of ``group``, or of any, is kept."""
        return any(group in (None, kept.group) for entries in self._kept.values() for kept in entries)

    def push_or_keep(self, owner: int, group: int, epoch: int, piece: Any, read_word: ReadWord) -> Steps:
        """Push ``piece`` if there is a slot for it and nothing is kept, else keep it; waits for this rank's own device at most."""
        operation = f"run-ahead of pushes of group {self._t.groups[group]} (epoch {epoch})"
        yield Wait(self._t.rank, "head", owner, self._heads[owner] + 1 - self._ahead, operation)
        yield from self.push_kept(owner, epoch, read_word)
        if not self._kept[owner] and self._has_slot(owner, read_word):
            yield from self._push(owner, lambda slot: self._plane.push(owner, slot, group, epoch, piece))
            return
        kept = next((kept for kept in self._kept[owner] if kept.group == group and not kept.pushed), None)
        if kept is None:
            self.sums_kept += 1
            kept = _Kept(self.sums_kept, group)
            self._kept[owner].append(kept)
        entry = kept.entry
        yield Do(lambda: self._plane.keep(owner, entry, group, piece))

    def push_kept(self, owner: int, epoch: int, read_word: ReadWord, *, wait: bool = False) -> Steps:
        """Push what is kept for ``owner`` as far as there are slots; with ``wait`` all of it."""
        entries = self._kept[owner]
        while entries:
            first, part = entries[0], entries[0].pushed
            if wait:
                operation = f"push of group {self._t.groups[first.group]} (epoch {epoch})"
                yield Wait(owner, "tail", self._t.rank, self._heads[owner] - self._slots + 1, operation)
            elif not self._has_slot(owner, read_word):
                return
            first.pushed += 1
            if first.pushed == self._plane.kept_parts(first.group):
                entries.pop(0)
            push: Callable[[int], None] = lambda slot, kept=first, part=part: self._plane.push_kept(  # type: ignore[misc]  # noqa: E731
                owner, slot, kept.group, epoch, kept.entry, part
            )
            yield from self._push(owner, push)

    def _push(self, owner: int, push: Callable[[int], None]) -> Steps:
        head = self._heads[owner]
        yield Do(lambda: push(head % self._slots))
        self._heads[owner] = head + 1
        yield Store("head", owner, head + 1)

    def _has_slot(self, owner: int, read_word: ReadWord) -> bool:
        return read_word(owner, "tail", self._t.rank) > self._heads[owner] - self._slots
