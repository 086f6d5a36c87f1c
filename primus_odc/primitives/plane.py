"""The data plane: every transfer is a copy or an addition between the ranks' arenas, in host or device memory alike.

What stands in the arena: published shards (both modes); the unsharded gradient sums (``local``), pulled by their owners; or the rings
into which sources push pieces, and the accumulators of what arrived (``owner``). Sums and ``.grad`` are ordinary memory.

On a device every method only gives work to streams (:mod:`primus_odc.primitives.lanes`) and returns; words are stored in the order of
those streams (:meth:`SymmetricHeap.store`). Who runs where:

* publishing, completing groups without a gradient: the caller's stream;
* gathers: side streams between two points of FSDP2's own all-gather stream;
* accumulation, own pieces: FSDP2's reduce-scatter stream, in which the gradients were made;
* pulls, sums, ``.grad``: the settle stream, which waits for events of this device only, not for the end of backward;
* (owner mode) pushes: one stream per owner; arrivals: a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from primus_odc.errors import ProtocolError
from primus_odc.primitives.checksum import check, checksum
from primus_odc.primitives.contribution import Contribution, UnshardedSum
from primus_odc.primitives.lanes import Lanes
from primus_odc.primitives.publisher import Publisher
from primus_odc.primitives.spec import PIECE_DTYPES, PIECE_WORDS, GroupSpec, piece_bytes
from primus_odc.primitives.sums import Part, Present, SumTogether, add_into, make_sum
from primus_odc.primitives.topology import Topology
from primus_odc.symmetric.heap import SymmetricHeap

Piece = tuple[int, torch.Tensor]
"""``(offset in the owner's full gradient shard, 1-D gradients)``."""


Fill = Callable[[torch.Tensor], None]
"""Writes a settled gradient shard where it is told to."""

MERGE_BYTES = 4 << 20
_ARRIVALS, _OWN = 0, 1


class ArenaPlane:
    """Implements :class:`primus_odc.primitives.protocol.DataPlane` on a :class:`SymmetricHeap`.

    Args:
        heap: made from :func:`primus_odc.primitives.spec.plan_arena` of the same groups.
        topology: who is who; ``topology.peers.index(rank)`` is this rank's shard index.
        read_shard_of: ``(group, param) -> this rank's local shard`` (any shape, the parameter's own dtype).
        reshard: drops all unsharded parameters.
        deliver: ``(group, fill)``: ``fill`` writes the finished gradient shard into a tensor ``[grad_numel]`` of the group's
            ``sum_dtype``; may be called twice.
        mode, slots: as the protocol's.
        verify: check every transfer by checksum.
        direct: group -> where ``fill`` will be told to write, if nothing but ``fill`` has to happen there, else None.
        merge_bytes: neighbouring groups are summed and delivered together until their gradient shards are so many bytes; None: 4 MiB on
            a device, where a launch costs as much as a small transfer, 0 in host memory.

    Attributes:
        stays_narrow: whether a rank's sum of one contribution stays in that one's dtype (:class:`UnshardedSum`). Not where sums are made in
            place, across nodes, or checked.
        bytes_gathered, bytes_reduced: bytes of shards and of gradients that this rank moved; only grow.
        bytes_across: those of them that it put into other nodes.
        deliveries: None; a list that whoever measures puts here gets, for every group delivered, a timing event and the
            bytes of other ranks' gradients in it.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        topology: Topology,
        groups: Sequence[GroupSpec],
        *,
        read_shard_of: Callable[[int, int], torch.Tensor],
        reshard: Callable[[], None],
        deliver: Callable[[int, Fill], None],
        mode: str,
        slots: int,
        verify: bool,
        direct: Callable[[int], torch.Tensor | None] = lambda group: None,
        merge_bytes: int | None = None,
    ) -> None:
        self.heap = heap
        self.t = topology
        self._me = topology.names[topology.rank]
        self.groups = groups
        self.verify = verify
        self.bytes_gathered = 0
        self.bytes_reduced = 0
        self.bytes_across = 0
        self.reshard = reshard
        self._deliver = deliver
        self._shard_of = {rank: shard for shard, rank in enumerate(topology.peers)}
        self._shard = self._shard_of[topology.rank]
        self._slots = slots
        self._piece_bytes = piece_bytes(groups, heap.device)
        self.lanes = Lanes(heap.device, topology.ranks, mode == "owner")
        self._shards = [
            [heap.view(r, heap.plan.regions[f"shard.{g}"]) for g in range(len(groups))]
            if r in topology.peers and r in topology.near
            else []
            for r in range(topology.ranks)
        ]
        self.publisher = Publisher(groups, self._shards[topology.rank], read_shard_of)
        self._mode = mode
        self.stays_narrow = mode == "local" and topology.nodes is None and not verify
        read = topology.near if mode == "local" else topology.replicas
        self._grads = [
            [self._gradients(r, g) if r in read else torch.empty(0, device=heap.device) for g in range(len(groups))]
            for r in range(topology.ranks)
        ]
        self._accumulated = [self.lanes.event() for _ in groups]
        if mode == "local":
            self._unsharded = [UnshardedSum(s, self._grads[topology.rank][g], partial(self._alone, g)) for g, s in enumerate(groups)]
        else:
            self._own = [torch.empty(s.grad_numel, dtype=s.sum_dtype, device=heap.device) for s in groups]
            self._own_epoch = [0] * len(groups)
            self._kept: dict[tuple[int, int], torch.Tensor] = {}
            self._arrived_bytes = [0] * len(groups)
        self._arrived_epoch = [0] * len(groups)
        largest = max((s.grad_nbytes for s in groups), default=0)
        self._scratch = torch.empty(largest if verify else 0, dtype=torch.uint8, device=heap.device)
        self._staging = torch.empty(largest if verify else 0, dtype=torch.uint8, device=heap.device)
        # Without replicas nobody else reads this rank's accumulators, and what it made itself is a source beside them.
        self._apart = mode == "owner" and len(topology.replicas) == 1 and not verify
        self._sums = [make_sum(self._sources(g), heap.device, self._narrow_shift(g), here=self._apart) for g in range(len(groups))]
        self._together = SumTogether(heap.device)
        self._direct = direct
        self._merge_bytes = 0 if verify else merge_bytes if merge_bytes is not None else MERGE_BYTES if heap.device.type != "cpu" else 0
        self._pending: list[tuple[int, dict[int, torch.dtype | None]]] = []
        self._present: dict[int, torch.dtype | None] = {}
        self.deliveries: list[tuple[Any, int]] | None = None

    def _sources(self, group: int) -> dict[int, torch.Tensor]:
        """What a settled gradient shard is the sum of, by number: a rank, or (``owner`` without replicas) arrivals and own pieces."""
        if self._apart:
            return {_ARRIVALS: self._grads[self.t.rank][group][0], _OWN: self._own[group]}
        ranks, row = (range(self.t.ranks), self._shard) if self._mode == "local" else (self.t.replicas, 0)
        return {r: self._grads[r][group][row] for r in ranks}

    def _narrow_shift(self, group: int) -> int:
        """Bytes by which a source's slice for this rank begins earlier where it stayed in a dtype of two bytes; 0 where none may."""
        spec = self.groups[group]
        return 2 * self._shard * spec.grad_numel if self.stays_narrow and spec.sum_dtype.itemsize == 4 else 0

    def _gradients(self, rank: int, group: int) -> torch.Tensor:
        """``[shards, grad_numel]`` (local mode: unsharded sums) or ``[1, grad_numel]`` (owner mode: accumulator) of any rank."""
        spec = self.groups[group]
        return (
            self.heap.view(rank, self.heap.plan.regions[f"grads.{group}"])
            .view(spec.sum_dtype)
            .view(spec.shards if self._mode == "local" else 1, spec.grad_numel)
        )

    def _alone(self, group: int) -> bool:
        """Whether what is added of ``group`` now has the device to itself: backward ends with the first group, the root's."""
        return group == 0 or self.lanes.compute_is_over()

    def max_piece_numel(self, dtype: torch.dtype) -> int:
        """Elements of ``dtype`` that fit one slot."""
        return self._piece_bytes // dtype.itemsize

    def publish_shard(self, group: int, epoch: int) -> None:
        self.publisher.add(group)
        if self.verify or group == len(self.groups) - 1:
            self.publisher.copy()
        if self.verify and self.groups[group].shards > 1:
            self.heap.words.put("shard_sum", checksum(self.own_shard(group), epoch), group)

    @torch.no_grad()
    def current_shard(self, group: int) -> torch.Tensor:
        """What this rank would publish of ``group`` now: uint8 ``[shard_nbytes]``, ordinary memory."""
        mine = torch.zeros(self.groups[group].shard_nbytes, dtype=torch.uint8, device=self.heap.device)
        self.publisher.copy_to(group, mine)
        return mine

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        """``into(owner)`` gives ``[(start byte, stop byte, destination)]`` of the owner's shard (see :mod:`primus_odc.fsdp.gather`)."""
        shard = self._shards[owner][group]
        with self.lanes.gather_copy():
            if self.verify:
                what = f"{self._me}: shard of group {self.groups[group].name} read from {self.t.names[owner]} (epoch {epoch})"
                shard = shard.clone()
                check(shard, epoch, self._announced_shard(owner, group), what)
            for start, stop, destination in into(owner):
                destination.copy_(shard[start:stop], non_blocking=True)
                self.bytes_gathered += stop - start

    def _announced_shard(self, owner: int, group: int) -> int:
        """Checksum of the shard that :meth:`read_shard` reads."""
        return self.heap.words.read(owner, "shard_sum", group)

    def _announced_sum(self, source: int, group: int) -> int:
        """Checksum of what :meth:`pull` adds."""
        return self.heap.words.read(source, "grad_sum", group * self.groups[group].shards + self._shard)

    def own_shard(self, group: int) -> torch.Tensor:
        """What this rank published of ``group``: uint8 ``[shard_nbytes]``."""
        return self._shards[self.t.rank][group]

    def place(self, group: int, dtype: torch.dtype, *, only: bool) -> torch.Tensor | None:
        """(local mode) Where FSDP2 may write the gradients of one reduction of all parameters, so that :meth:`accumulate` need not copy
        them: ``[shards * grad_numel]``; None: nowhere. ``only``: no other reduction of the group is expected in this epoch."""
        return self._unsharded[group].place(dtype, only=only and self.stays_narrow)

    def accumulate(self, group: int, contribution: Contribution) -> None:
        self._unsharded[group].add(contribution)
        self.lanes.record(self._accumulated[group])

    def complete(self, group: int, epoch: int) -> None:
        self.lanes.wait(self._accumulated[group])
        if self._mode == "local":
            narrow = self._unsharded[group].complete()
            # In host memory at once, while ``ready`` is stored later, by the stream: who has seen that sees this.
            self.heap.words.put("narrow", 0 if narrow is None else PIECE_DTYPES.index(narrow), group)
        else:
            self._complete_accumulator(group, epoch)
        self.lanes.record(self._accumulated[group])
        if self.verify:
            for row, sums in enumerate(self._grads[self.t.rank][group]):
                owner = row if self._mode == "local" else self._shard
                self.heap.words.put("grad_sum", checksum(sums, epoch), group * self.groups[group].shards + owner)

    def _complete_accumulator(self, group: int, epoch: int) -> None:
        """Arrivals are over (the protocol has waited for them): add what this rank made itself, where replicas want to read the sum."""
        if self._apart:
            return
        accumulator = self._grads[self.t.rank][group][0]
        own = self._own_epoch[group] == epoch
        if self._arrived_epoch[group] == epoch:
            if own:
                accumulator.add_(self._own[group])
        elif own:
            accumulator.copy_(self._own[group])
        else:
            accumulator.zero_()

    def finish_pushes(self) -> None:
        self.lanes.wait_for_pushes()

    def finish_transfers(self) -> None:
        if self._pending:
            self._deliver_pending()
        self.lanes.wait_for_transfers()

    def unsharded(self, group: int) -> torch.Tensor:
        """(local mode) This rank's own unsharded sum: ``[shards, grad_numel]``; complete between ``complete`` and the next epoch."""
        return self._unsharded[group].buffer

    def pull(self, source: int, group: int, epoch: int) -> None:
        spec, number = self.groups[group], self.heap.words.read(source, "narrow", group)
        narrow = PIECE_DTYPES[number] if number else None
        if source == self.t.rank:
            # Its own word is stored in stream order, perhaps much later: what counts here is the event.
            self.lanes.wait(self._accumulated[group])
        else:
            self.bytes_reduced += spec.grad_nbytes if narrow is None else spec.grad_numel * narrow.itemsize
        if self._apart:
            epochs = {_ARRIVALS: self._arrived_epoch[group], _OWN: self._own_epoch[group]}
            self._present |= {number: None for number, made in epochs.items() if made == epoch}
            return
        if self.verify:
            self._pull_checked(source, group, epoch)
        self._present[source] = narrow

    def _pull_checked(self, source: int, group: int, epoch: int) -> None:
        """Sum up at once, from a copy, so that the bytes that were checked are the bytes that count."""
        spec = self.groups[group]
        theirs = self._staging[: spec.grad_nbytes].view(spec.sum_dtype)
        theirs.copy_(self._sources(group)[source])
        what = f"{self._me}: gradients of group {spec.name} pulled from {self.t.names[source]} (epoch {epoch})"
        check(theirs, epoch, self._announced_sum(source, group), what)
        total = self._total(group)
        if self._present:
            total.add_(theirs)
        else:
            total.copy_(theirs)

    def _total(self, group: int) -> torch.Tensor:
        spec = self.groups[group]
        return self._scratch[: spec.grad_nbytes].view(spec.sum_dtype)

    def push(self, owner: int, slot: int, group: int, epoch: int, piece: Piece) -> None:
        offset, gradients = piece
        place = self._slot(owner, self.t.rank, slot)[: gradients.nbytes].view(gradients.dtype)
        place.copy_(gradients, non_blocking=True)
        crc = checksum(place, epoch) if self.verify else 0
        header = (epoch, group, offset, gradients.numel(), PIECE_DTYPES.index(gradients.dtype), crc)
        for field, value in enumerate(header):
            self.heap.words.put("piece", value, self._header(owner, slot) + field)
        self.bytes_reduced += gradients.nbytes

    def keep(self, owner: int, entry: int, group: int, piece: Piece) -> None:
        spec = self.groups[group]
        fresh = (owner, entry) not in self._kept
        if fresh:
            # Made and given up while the stream of this owner's pushes is current, so its memory is not used again too early.
            self._kept[owner, entry] = torch.empty(spec.grad_numel, dtype=spec.sum_dtype, device=self.heap.device)
        _add_piece(self._kept[owner, entry], piece, fresh, self._alone(group))

    def kept_parts(self, group: int) -> int:
        spec = self.groups[group]
        return -(-spec.grad_numel // self.max_piece_numel(spec.sum_dtype))

    def push_kept(self, owner: int, slot: int, group: int, epoch: int, entry: int, part: int) -> None:
        kept = self._kept[owner, entry]
        numel = self.max_piece_numel(kept.dtype)
        self.push(owner, slot, group, epoch, (part * numel, kept[part * numel : (part + 1) * numel]))
        if part == self.kept_parts(group) - 1:
            del self._kept[owner, entry]

    def add_own(self, group: int, epoch: int, piece: Piece) -> None:
        fresh = self._own_epoch[group] != epoch
        self._own_epoch[group] = epoch
        _add_piece(self._own[group], piece, fresh, self._alone(group))
        self.lanes.record(self._accumulated[group])

    def add_arrival(self, source: int, slot: int, epoch: int) -> None:
        header = self._header(self.t.rank, slot)
        sent, group, offset, numel, dtype, crc = (self.heap.words.read(source, "piece", header + field) for field in range(PIECE_WORDS))
        if sent != epoch:
            raise ProtocolError(f"{self._me}: {self.t.names[source]} pushed gradients of epoch {sent} while epoch {epoch} is summed")
        gradients = self._slot(self.t.rank, source, slot)[: numel * PIECE_DTYPES[dtype].itemsize].view(PIECE_DTYPES[dtype])
        if self.verify:
            what = f"{self._me}: gradients of group {self.groups[group].name} pushed by {self.t.names[source]} (epoch {epoch})"
            gradients = gradients.clone()
            check(gradients, epoch, crc, what)
        self._arrived_bytes[group] += gradients.nbytes
        fresh = self._arrived_epoch[group] != epoch
        _add_piece(self._grads[self.t.rank][group][0], (offset, gradients), fresh, self._alone(group))
        self._arrived_epoch[group] = epoch

    def _header(self, owner: int, slot: int) -> int:
        """First control word, in the source's block, of the header of what it pushed into ``slot`` at ``owner``."""
        return (self._shard_of[owner] * self._slots + slot) * PIECE_WORDS

    def _slot(self, owner: int, source: int, slot: int) -> torch.Tensor:
        ring = self.heap.view(owner, self.heap.plan.regions[f"ring.{self._shard_of[source]}"])
        return ring[slot * self._piece_bytes : (slot + 1) * self._piece_bytes]

    def deliver(self, group: int) -> None:
        self._pending.append((group, self._present))
        self._present = {}
        sources = len(self._sources(group))
        if self._pending_bytes() >= self._merge_bytes or not self._together.fits(len(self._pending) + 1, sources):
            self._deliver_pending()

    def _pending_bytes(self) -> int:
        return sum(self.groups[group].grad_nbytes for group, _ in self._pending)

    def _deliver_pending(self) -> None:
        """Sum and deliver the groups whose turn has come; several at once where they are small and written straight into ``.grad``."""
        pending, self._pending = self._pending, []
        dtypes = {self.groups[group].sum_dtype for group, _ in pending}
        direct = {group: self._direct(group) for group, _ in pending} if len(pending) > 1 and len(dtypes) == 1 else {}
        parts = [
            Part(total, self._sources(g), present, self._narrow_shift(g)) for g, present in pending if (total := direct.get(g)) is not None
        ]
        alone = self._alone(pending[-1][0])
        if parts:
            self._together(parts, alone=alone)

        def fill(total: torch.Tensor, group: int, present: Present) -> None:
            if direct.get(group) is not None:
                return
            if self.verify and present:
                total.copy_(self._total(group))
            else:
                self._sums[group](total, present, alone=alone)

        for group, present in pending:
            self._deliver(group, partial(fill, group=group, present=present))
            if self.deliveries is not None:
                self.deliveries.append((self.lanes.timing_mark(), self._received_bytes(group, present)))
            if self._mode == "owner":
                self._arrived_bytes[group] = 0

    def _received_bytes(self, group: int, present: Present) -> int:
        """Gradients of other ranks in the sum that is delivered now."""
        arrived = self._arrived_bytes[group] if self._mode == "owner" else 0
        spec = self.groups[group]
        others = [] if self._apart else [dtype or spec.sum_dtype for source, dtype in present.items() if source != self.t.rank]
        return arrived + sum(spec.grad_numel * dtype.itemsize for dtype in others)


def _add_piece(total: torch.Tensor, piece: Piece, fresh: bool, alone: bool) -> None:
    """Add a piece where it belongs; a ``fresh`` total holds nothing yet."""
    offset, gradients = piece
    whole = gradients.numel() == total.numel()
    if fresh and not whole:
        total.zero_()
    add_into(total[offset : offset + gradients.numel()], gradients, fresh=fresh and whole, alone=alone)
