"""The data plane across nodes: copies and sums inside a node, one-sided puts into the memory of another one.

Beside what :mod:`primus_odc.primitives.plane` says stand in the arena fan-out copies of other nodes' published shards, and staging slots
for other nodes' partial sums. Of another node's memory only its rank, a region and a byte offset are known here: nothing of it is mapped.
What is put into other nodes, and the words behind it, go through a stream of their own (:meth:`Lanes.sending`): a put waits there until it
is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from primus_odc.primitives.checksum import check, checksum
from primus_odc.primitives.plane import ArenaPlane, Fill
from primus_odc.primitives.spec import CHECKSUM_BYTES, GroupSpec
from primus_odc.primitives.sums import make_sum
from primus_odc.primitives.topology import Topology
from primus_odc.symmetric.arena import Region
from primus_odc.symmetric.heap import SymmetricHeap


class TwoLevelPlane(ArenaPlane):
    """Implements :class:`primus_odc.primitives.two_level.NodePlane` in ``local`` mode; arguments as those of :class:`ArenaPlane`."""

    def __init__(
        self,
        heap: SymmetricHeap,
        topology: Topology,
        groups: Sequence[GroupSpec],
        *,
        read_shard_of: Callable[[int, int], torch.Tensor],
        reshard: Callable[[], None],
        deliver: Callable[[int, Fill], None],
        verify: bool,
        direct: Callable[[int], torch.Tensor | None] = lambda group: None,
    ) -> None:
        assert topology.nodes is not None
        self._nodes = topology.nodes
        self._node = self._nodes.node_of[topology.rank]
        self._node_partials: dict[int, dict[int, torch.Tensor]] = {}
        super().__init__(
            heap,
            topology,
            groups,
            read_shard_of=read_shard_of,
            reshard=reshard,
            deliver=deliver,
            mode="local",
            slots=0,
            verify=verify,
            direct=direct,
        )
        for owner, (home, slot) in self._nodes.landings(self._node).items():
            copies = [heap.view(home, heap.plan.regions[f"land.{slot}.{g}"])[: s.shard_nbytes] for g, s in enumerate(groups)]
            self._shards[owner] = copies
        order = [*topology.near[topology.near.index(topology.rank) :], *topology.near[: topology.near.index(topology.rank)]]
        self._node_sums = {
            shard: [make_sum({mate: self._grads[mate][g][shard] for mate in order}, heap.device) for g in range(len(groups))]
            for shard in self._nodes.reduced_by(topology.rank)
        }
        self._in_node: list[int] = []
        self._announced = heap.view(topology.rank, heap.plan.regions["announced"]).view(torch.int64)
        heap.sends = self.lanes.sending

    def _staged(self, reducer: int, group: int) -> torch.Tensor:
        """The whole staging slot in this node for the partial that ``reducer`` of another node makes of this rank's shard: bytes."""
        here = self._nodes.reducer(self._node, self._shard)
        return self.heap.view(here, self._staging_slot(self._nodes.node_of[reducer], self._node, group))

    def _staging_slot(self, source: int, node: int, group: int) -> Region:
        """The slot that node ``source`` has in the arena of an owner in ``node``."""
        return self.heap.plan.regions[f"stage.{source - (source > node)}.{group}"]

    def _sources(self, group: int) -> dict[int, torch.Tensor]:
        """The nodes' partials of this rank's shard, by reducer."""
        if group in self._node_partials:
            return self._node_partials[group]
        spec, found = self.groups[group], self._node_partials.setdefault(group, {})
        for node in range(self._nodes.count):
            reducer = self._nodes.reducer(node, self._shard)
            if node == self._node:
                found[reducer] = self._grads[reducer][group][self._shard]
            else:
                found[reducer] = self._staged(reducer, group)[: spec.grad_nbytes].view(spec.sum_dtype)
        return found

    def land_shard(self, home: int, slot: int, group: int, epoch: int) -> None:
        shard = self.own_shard(group)
        self._put(home, self.heap.plan.regions[f"land.{slot}.{group}"], shard, epoch, self._announcement(group))
        self.bytes_gathered += shard.nbytes

    def add_in_node(self, source: int, shard: int, group: int, epoch: int) -> None:
        if source == self.t.rank:
            self.lanes.wait(self._accumulated[group])
        else:
            self.bytes_reduced += self.groups[group].grad_nbytes
        if self.verify:
            self._add_checked(source, shard, group, epoch)
        self._in_node.append(source)

    def _add_checked(self, source: int, shard: int, group: int, epoch: int) -> None:
        """As :meth:`_pull_checked`: at once, from a copy."""
        spec, partial = self.groups[group], self._grads[self.t.rank][group][shard]
        theirs = self._staging[: spec.grad_nbytes].view(spec.sum_dtype)
        theirs.copy_(self._grads[source][group][shard])
        what = f"{self._me}: gradients of group {spec.name} pulled from {self.t.names[source]} (epoch {epoch})"
        check(theirs, epoch, self.heap.words.read(source, "grad_sum", group * spec.shards + shard), what)
        if self._in_node:
            partial.add_(theirs)
        else:
            partial.copy_(theirs)

    def complete_partial(self, shard: int, group: int, epoch: int) -> None:
        # In place: this rank's own row comes first in the sum, and no other rank reads it before the partial is complete.
        partial = self._grads[self.t.rank][group][shard]
        if self.verify and shard == self._shard:
            self.heap.words.put("partial_sum", checksum(partial, epoch), group)
        elif not self.verify and self._in_node != [self.t.rank]:  # alone it is complete as it stands
            self._node_sums[shard][group](partial, dict.fromkeys(self._in_node))
        self._in_node.clear()

    def send_partial(self, reducer: int, shard: int, group: int, epoch: int) -> None:
        partial = self._grads[self.t.rank][group][shard]
        region = self._staging_slot(self._node, self._nodes.node_of[reducer], group)
        self._put(reducer, region, partial, epoch, self._announcement(group, shard))
        self.bytes_reduced += partial.nbytes

    def pull(self, source: int, group: int, epoch: int) -> None:
        if source in self.t.near:
            super().pull(source, group, epoch)
            return
        # It has come here already, and was counted by who sent it.
        if self.verify:
            self._pull_checked(source, group, epoch)
        self._present[source] = None

    def send_scalar(self, home: int, slot: int, parity: int) -> None:
        self.heap.put_word(home, "far_scalar", self.heap.words.read(self.t.rank, "scalar", parity), 2 * slot + parity)

    def _announcement(self, group: int, shard: int | None = None) -> torch.Tensor:
        """Where the checksum of what is sent of ``group`` is kept, the partial of ``shard`` or the own shard: int64 ``[1]``."""
        row = 0 if shard is None else 1 + shard
        return self._announced[group * (1 + self.groups[group].shards) + row].view(1)

    def _put(self, rank: int, region: Region, data: torch.Tensor, epoch: int, announcement: torch.Tensor) -> None:
        self.heap.put(rank, region, data)
        if self.verify:
            announcement.fill_(checksum(data, epoch))
            self.heap.put(rank, region, announcement, region.nbytes - CHECKSUM_BYTES)
        self.bytes_across += data.nbytes

    def _announced_shard(self, owner: int, group: int) -> int:
        if owner in self.t.near:
            return super()._announced_shard(owner, group)
        home, slot = self._nodes.landings(self._node)[owner]
        return _last_word(self.heap.view(home, self.heap.plan.regions[f"land.{slot}.{group}"]))

    def _announced_sum(self, source: int, group: int) -> int:
        if source in self.t.near:
            return self.heap.words.read(source, "partial_sum", group)
        return _last_word(self._staged(source, group))


def _last_word(region: torch.Tensor) -> int:
    return int(region[-CHECKSUM_BYTES:].view(torch.int64))
