"""The data plane over host memory: every transfer is a copy or an addition between mapped segments.

What stands in the arena: published shards (both modes); the unsharded gradient sums (``local``), pulled by their owners; or the rings
into which sources push pieces (``owner``). Sums and ``.grad`` are ordinary memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from primus_odc.errors import ProtocolError
from primus_odc.primitives.checksum import check, checksum
from primus_odc.primitives.contribution import Contribution, UnshardedSum
from primus_odc.primitives.protocol import Topology
from primus_odc.primitives.spec import PIECE_HEADER_BYTES, GroupSpec, piece_bytes
from primus_odc.symmetric.heap import SymmetricHeap

Piece = tuple[int, torch.Tensor]
"""``(offset in the owner's full gradient shard, 1-D gradients)``."""


class HostPlane:
    """Implements :class:`primus_odc.primitives.protocol.DataPlane` for CPU tensors.

    Args:
        heap: made from :func:`primus_odc.primitives.spec.plan_arena` of the same groups.
        topology: who is who; ``topology.peers.index(rank)`` is this rank's shard index.
        read_shard_of: ``(group, param) -> this rank's local shard`` (any shape, the parameter's own dtype).
        reshard: drops all unsharded parameters.
        deliver: ``(group, sum)`` receives the finished gradient shard, shape ``[grad_numel]`` in the group's ``sum_dtype``; it must
            copy, the sum is reused.
        mode, slots: as the protocol's.
        verify: check every transfer by checksum.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        topology: Topology,
        groups: Sequence[GroupSpec],
        *,
        read_shard_of: Callable[[int, int], torch.Tensor],
        reshard: Callable[[], None],
        deliver: Callable[[int, torch.Tensor], None],
        mode: str,
        slots: int,
        verify: bool,
    ) -> None:
        self.heap = heap
        self.t = topology
        self.groups = groups
        self.verify = verify
        self.bytes_gathered = 0
        self.bytes_reduced = 0
        self.reshard = reshard
        self._read_shard_of = read_shard_of
        self._deliver = deliver
        self._shard_of = {rank: shard for shard, rank in enumerate(topology.peers)}
        self._shard = self._shard_of[topology.rank]
        self._slots = slots
        self._piece_bytes = piece_bytes(groups)
        self._shards = [
            [heap.view(r, heap.plan.regions[f"shard.{g}"]) for g in range(len(groups))] if r in topology.peers else []
            for r in range(topology.ranks)
        ]
        self._lock = threading.Lock()
        self._mode = mode
        self._grads = [
            [self._gradients(r, g) if mode == "local" or r in topology.replicas else torch.empty(0) for g in range(len(groups))]
            for r in range(topology.ranks)
        ]
        if mode == "local":
            self._unsharded = [UnshardedSum(s, self._grads[topology.rank][g]) for g, s in enumerate(groups)]
        self._summed_epoch = [0] * len(groups)
        largest = max((s.grad_nbytes for s in groups), default=0)
        self._scratch = torch.empty(largest, dtype=torch.uint8)
        self._staging = torch.empty(largest if verify else 0, dtype=torch.uint8)
        self._pulled = 0

    def _gradients(self, rank: int, group: int) -> torch.Tensor:
        """``[shards, grad_numel]`` (local mode: unsharded sums) or ``[1, grad_numel]`` (owner mode: accumulator) of any rank."""
        spec = self.groups[group]
        return (
            self.heap.view(rank, self.heap.plan.regions[f"grads.{group}"])
            .view(spec.sum_dtype)
            .view(spec.shards if self._mode == "local" else 1, spec.grad_numel)
        )

    def max_piece_numel(self, group: int) -> int:
        """Elements of ``group`` that fit one slot."""
        return self._piece_bytes // self.groups[group].sum_dtype.itemsize

    def publish_shard(self, group: int, epoch: int) -> None:
        if self.groups[group].shards == 1:
            return  # nobody gathers from a shard group of one
        mine = self._shards[self.t.rank][group]
        for i, p in enumerate(self.groups[group].params):
            local = self._read_shard_of(group, i)
            place = mine[p.shard_offset : p.shard_offset + p.local_numel * p.gather_dtype.itemsize]
            if p.shard_offset % p.gather_dtype.itemsize:  # behind parameters of a narrower dtype
                place.copy_(local.detach().to(p.gather_dtype).reshape(-1).view(torch.uint8))
            else:
                place.view(p.gather_dtype).copy_(local.detach().reshape(-1))
        if self.verify:
            self.heap.words.put("shard_sum", checksum(mine, epoch), group)

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        """``into(owner)`` gives ``[(start byte, stop byte, destination)]`` of the owner's shard (see :mod:`primus_odc.fsdp.gather`)."""
        shard = self._shards[owner][group]
        if self.verify:
            what = f"{self.t.names[self.t.rank]}: shard of group {self.groups[group].name} read from {self.t.names[owner]} (epoch {epoch})"
            copy = shard.clone()
            check(copy, epoch, self.heap.words.read(owner, "shard_sum", group), what)
            shard = copy
        for start, stop, destination in into(owner):
            destination.copy_(shard[start:stop])
            self.bytes_gathered += stop - start

    def own_shard(self, group: int) -> torch.Tensor:
        """What this rank published of ``group``: uint8 ``[shard_nbytes]``."""
        return self._shards[self.t.rank][group]

    def accumulate(self, group: int, contribution: Contribution) -> None:
        self._unsharded[group].add(contribution)

    def complete(self, group: int, epoch: int) -> None:
        if self._mode == "local":
            self._unsharded[group].complete()
            self._unsharded[group].reset()
        else:
            with self._lock:
                self._begin_sum(group, epoch)
        if self.verify:
            for row, sums in enumerate(self._grads[self.t.rank][group]):
                owner = row if self._mode == "local" else self._shard
                self.heap.words.put("grad_sum", checksum(sums, epoch), group * self.groups[group].shards + owner)

    def unsharded(self, group: int) -> torch.Tensor:
        """(local mode) This rank's own unsharded sum: ``[shards, grad_numel]``; complete between ``complete`` and the next epoch."""
        return self._unsharded[group].buffer

    def pull(self, source: int, group: int, epoch: int) -> None:
        spec = self.groups[group]
        theirs = self._grads[source][group][self._shard if self._mode == "local" else 0]
        if self.verify:
            staging = self._staging[: spec.grad_nbytes].view(spec.sum_dtype)
            theirs = staging.copy_(theirs)
            what = f"{self.t.names[self.t.rank]}: gradients of group {spec.name} pulled from {self.t.names[source]} (epoch {epoch})"
            check(theirs, epoch, self.heap.words.read(source, "grad_sum", group * spec.shards + self._shard), what)
        total = self._scratch[: spec.grad_nbytes].view(spec.sum_dtype)
        if self._pulled:
            total.add_(theirs)
        else:
            total.copy_(theirs)
        self._pulled += 1
        if source != self.t.rank:
            self.bytes_reduced += spec.grad_nbytes

    def push(self, owner: int, slot: int, group: int, epoch: int, piece: Piece) -> None:
        offset, gradients = piece
        header, payload = self._slot(owner, self.t.rank, slot)
        place = payload[: gradients.numel() * self.groups[group].sum_dtype.itemsize].view(self.groups[group].sum_dtype)
        place.copy_(gradients)
        header[:5] = epoch, group, offset, gradients.numel(), checksum(place, epoch) if self.verify else 0
        self.bytes_reduced += place.nbytes

    def add_own(self, group: int, epoch: int, piece: Piece) -> None:
        self._add(group, epoch, *piece)

    def _begin_sum(self, group: int, epoch: int) -> None:
        """The first addition of an epoch starts from zero; held under the lock, since the progress thread adds too."""
        if self._summed_epoch[group] != epoch:
            self._summed_epoch[group] = epoch
            self._grads[self.t.rank][group].zero_()

    def _add(self, group: int, epoch: int, offset: int, gradients: torch.Tensor) -> None:
        with self._lock:
            self._begin_sum(group, epoch)
            self._grads[self.t.rank][group][0, offset : offset + gradients.numel()].add_(gradients)

    def add_arrival(self, source: int, slot: int, epoch: int) -> None:
        header, payload = self._slot(self.t.rank, source, slot)
        sent, group, offset, numel, crc = (int(x) for x in header[:5])
        if sent != epoch:
            raise ProtocolError(
                f"{self.t.names[self.t.rank]}: {self.t.names[source]} pushed gradients of epoch {sent} while epoch {epoch} is summed"
            )
        spec = self.groups[group]
        gradients = payload[: numel * spec.sum_dtype.itemsize].view(spec.sum_dtype)
        if self.verify:
            what = f"{self.t.names[self.t.rank]}: gradients of group {spec.name} pushed by {self.t.names[source]} (epoch {epoch})"
            gradients = gradients.clone()
            check(gradients, epoch, crc, what)
        self._add(group, epoch, offset, gradients)

    def _slot(self, owner: int, source: int, slot: int) -> tuple[np.ndarray, torch.Tensor]:
        ring = self.heap.view(owner, self.heap.plan.regions[f"ring.{self._shard_of[source]}"])
        size = PIECE_HEADER_BYTES + self._piece_bytes
        piece = ring[slot * size : (slot + 1) * size]
        return piece[:PIECE_HEADER_BYTES].numpy().view(np.int64), piece[PIECE_HEADER_BYTES:]

    def deliver(self, group: int) -> None:
        spec = self.groups[group]
        total = self._scratch[: spec.grad_nbytes].view(spec.sum_dtype)
        if not self._pulled:
            total.zero_()
        self._pulled = 0
        self._deliver(group, total)
