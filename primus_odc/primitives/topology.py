"""What the protocol works on: the ranks, and the plane that moves their bytes (:mod:`primus_odc.primitives.protocol`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from primus_odc.primitives.nodes import Nodes


class DataPlane(Protocol):
    """What moves the bytes. Every method is called from a ``Do`` effect of the rank that owns the plane."""

    def reshard(self) -> None:
        """Drop every unsharded parameter, so that nothing gathered in an older epoch is used again."""

    def publish_shard(self, group: int, epoch: int) -> None:
        """Copy this rank's own parameter shard of ``group`` into its arena."""

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        """Copy the published shard of ``owner`` to its place in ``into``."""

    def accumulate(self, group: int, contribution: Any) -> None:
        """(local mode) Add one reduction's gradients to this rank's unsharded buffer of ``group``."""

    def complete(self, group: int, epoch: int) -> None:
        """Make this rank's buffer (local mode) or accumulator (owner mode) of ``group`` ready to be pulled: zero what received nothing."""

    def pull(self, source: int, group: int, epoch: int) -> None:
        """Add what ``source`` has for this rank's shard of ``group`` to the sum: its slice of the buffer of a source (local mode), the
        accumulator of a replica (owner mode)."""

    def push(self, owner: int, slot: int, group: int, epoch: int, piece: Any) -> None:
        """(owner mode) Copy one piece into slot ``slot`` of the ring this rank has at ``owner``."""

    def keep(self, owner: int, entry: int, group: int, piece: Any) -> None:
        """(owner mode) Add a piece for ``owner`` to the sum kept under the number ``entry``, which begins with its first piece."""

    def kept_parts(self, group: int) -> int:
        """(owner mode) In how many slots a kept sum of ``group`` travels."""

    def push_kept(self, owner: int, slot: int, group: int, epoch: int, entry: int, part: int) -> None:
        """(owner mode) As :meth:`push`, one part of a kept sum; behind the last part the sum is given up."""

    def add_own(self, group: int, epoch: int, piece: Any) -> None:
        """(owner mode) Add a piece this rank owns itself straight to its accumulator."""

    def add_arrival(self, source: int, slot: int, epoch: int) -> None:
        """(owner mode) Add the piece in slot ``slot`` of the ring of ``source`` to the accumulator it names."""

    def finish_pushes(self) -> None:
        """(owner mode) What is stored next covers every push this rank has started."""

    def finish_transfers(self) -> None:
        """What is stored next covers everything this rank has started: every gather, push and delivery."""

    def deliver(self, group: int) -> None:
        """Turn the finished sum of ``group`` into ``.grad`` and reset the sum."""


@dataclass(frozen=True)
class Topology:
    """Who talks to whom.

    ``ranks`` heap ranks in all (HSDP replicas included); ``peers`` the heap ranks of this rank's shard group in shard order; ``replicas``
    those that own the same shard as this rank, this rank included, in replica order; ``nodes`` which ranks share a node, None where all
    do.
    """

    rank: int
    ranks: int
    peers: Sequence[int]
    replicas: Sequence[int]
    groups: Sequence[str]
    names: Sequence[str]
    nodes: Nodes | None = None

    @property
    def near(self) -> Sequence[int]:
        """The ranks whose memory this one can read, itself included."""
        return range(self.ranks) if self.nodes is None else self.nodes.members[self.nodes.node_of[self.rank]]
