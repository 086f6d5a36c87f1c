"""Who falls silent while somebody waits.

A rank of another node is heard through its contact there. Where that one left without detaching (a script that ends without ``detach()``)
nobody can tell a rank that is stopped from one that is busy, and such a rank is given the time of a busy one, :data:`HARD_CAP_FACTOR`
time-outs, not the single one of a silent one. One would be too few: ``odc.timeout_s`` need only be a third of what the slowest rank takes
for a minibatch, so a rank that computes, or writes a checkpoint before it publishes, may rightly need more, and the run would end with a
rank blamed that does as it should. So long waits only who has no mate that hears of that rank through another contact: such a mate fails
after one time-out and tells its node why. A death is seen at once all the same, by the contact that the dead rank has in this node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from primus_odc.symmetric.board import Board
from primus_odc.symmetric.liveness import PeerWatcher

HARD_CAP_FACTOR = 3
"""A peer that beats but never arrives is given up after this many time-outs (it is stuck elsewhere, e.g. in a collective)."""


class Pulse:
    """Follows heartbeats from now on, for one wait.

    Args:
        board: has the heartbeats.
        watcher: knows who left, and through whom one hears of ranks of other nodes.
        names: of all ranks.
        ranks: those that are waited for.
        timeout_s: who shows no heartbeat for longer is given up.
    """

    def __init__(self, board: Board, watcher: PeerWatcher, names: Sequence[str], ranks: Iterable[int], timeout_s: float) -> None:
        self._board = board
        self._watcher = watcher
        self._names = names
        self._timeout_s = timeout_s
        self.start = time.monotonic()
        self._ranks = list(ranks)
        contacts = {watcher.contact_of(r) for r in self._ranks}
        self._seen = {r: (board.beat_of(r), self.start) for r in [*self._ranks, *contacts]}

    def fault(self) -> str:
        """Who has shown no sign of life for too long; empty if nobody. Ranks that left, and those one hears of through a rank that left,
        are not expected to show any."""
        for rank in self._ranks:
            silent_s, contact = self._silent_s(rank), self._watcher.contact_of(rank)
            if silent_s <= self._timeout_s or self._watcher.left & {rank, contact}:
                continue
            limit = f"(odc.timeout_s = {self._timeout_s:g})"
            if contact != rank and self._silent_s(contact) > self._timeout_s / 2:
                who = f"{self._names[contact]}, through which one hears of {self._names[rank]},"
            else:
                who = self._names[rank]
            return f"no sign of life from {who} for {silent_s:.1f} s {limit}"
        return ""

    def unheard(self) -> str:
        """Which rank nothing is heard of because its contact left, and when that began, as the beginning of a sentence; empty if none."""
        left = self._watcher.left
        for rank in self._ranks:
            contact = self._watcher.contact_of(rank)
            if contact != rank and contact in left and rank not in left:
                return f"nothing is heard of {self._names[rank]} since {self._names[contact]} left (detached or closed its heap)"
        return ""

    def overdue_s(self) -> float:
        """Seconds since the beginning, once they are :data:`HARD_CAP_FACTOR` time-outs; else 0."""
        passed_s = time.monotonic() - self.start
        return passed_s if passed_s > HARD_CAP_FACTOR * self._timeout_s else 0.0

    def _silent_s(self, rank: int) -> float:
        known, since = self._seen[rank]
        beat, now = self._board.beat_of(rank), time.monotonic()
        if beat != known:
            self._seen[rank] = beat, now
            return 0.0
        return now - since
