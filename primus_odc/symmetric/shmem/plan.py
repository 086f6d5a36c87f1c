"""What an operation becomes: transfers in the order of the peers, in batches that one launch takes.

An arena is a range of bytes of the same size on every PE. A place in it is an offset. This module only computes, so that the order, the
batches and every check of a range are tested without a GPU; the kernels (``csrc/kernels.cu``) trust what it gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from primus_odc.symmetric.arena import align

WORD_BYTES = 8
ROW_BYTES = 64 << 10
"""A block is not started for less."""


class Read(NamedTuple):
    """``nbytes`` at ``offset`` of the arena of ``pe`` go to the address ``into`` of this device."""

    pe: int
    offset: int
    into: int
    nbytes: int


class Write(NamedTuple):
    """``nbytes`` at the address ``source`` go to ``offset`` of the arena of ``pe``; then, where ``signal`` is an offset, ``value`` is
    stored there as a 64-bit word. A write of no bytes is a signal."""

    pe: int
    offset: int
    source: int
    nbytes: int
    signal: int | None = None
    value: int = 0


PART_BYTES = 1 << 20
"""The least that a write is cut into."""
_CUT_FROM = 4 * PART_BYTES
_TAIL_BYTES = ROW_BYTES


def cut(write: Write, parts: int) -> list[Write]:
    """The same bytes in up to ``parts`` writes that may arrive in any order, and behind them a short one with the signal."""
    if write.nbytes < _CUT_FROM:
        return [write]
    body = write.nbytes - _TAIL_BYTES
    size = align(max(PART_BYTES, -(-body // parts)))
    starts = [*range(0, body, size), body]
    ends = [*starts[1:], write.nbytes]
    pieces = [
        write._replace(offset=write.offset + start, source=write.source + start, nbytes=end - start, signal=None, value=0)
        for start, end in zip(starts, ends, strict=True)
    ]
    return [*pieces[:-1], pieces[-1]._replace(signal=write.signal, value=write.value)]


class Signal(NamedTuple):
    """The 64-bit word at ``offset`` of the arena of ``pe`` becomes ``value``."""

    pe: int
    offset: int
    value: int


class Wait(NamedTuple):
    """The 64-bit word at ``offset`` of this PE's own arena reaches ``at_least``; ``pe`` is who stores it, for messages."""

    pe: int
    offset: int
    at_least: int


_Item = TypeVar("_Item", Read, Write, Signal)

Transfer = tuple[int, int, int, int, int, int, int, int]
"""As the native module takes it: address here, the same place in this arena, its mapped address or 0, bytes, signal in this arena or 0, its
mapped address or 0, value, PE."""


@dataclass(frozen=True)
class Launch:
    """Transfers of one launch, and the blocks that each is given."""

    transfers: list[Transfer]
    blocks: int

    @property
    def signals_mapped(self) -> bool:
        """Whether a signal of a mapped PE is among them; a kernel of its own stores it, behind the data."""
        return any(peer and signal for _, _, peer, _, signal, _, _, _ in self.transfers)


@dataclass(frozen=True)
class ArenaMap:
    """Where one PE sees everybody's arena.

    Args:
        rank: this PE.
        nbytes: size of every arena.
        peers: by PE, the address its arena is mapped at here; 0: only the network reaches it. ``peers[rank]`` is this PE's own.
        batch: transfers one launch takes.
        max_blocks: blocks of one launch in all; the rest of the device belongs to compute.
    """

    rank: int
    nbytes: int
    peers: tuple[int, ...]
    batch: int = 32
    max_blocks: int = 64

    @property
    def base(self) -> int:
        """Address of this PE's own arena."""
        return self.peers[self.rank]

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in this PE's own arena."""
        return self.base <= address and address + nbytes <= self.base + self.nbytes

    def reads(self, reads: Sequence[Read]) -> Iterator[Launch]:
        """Launches for ``reads``.

        Raises:
            ValueError: a range leaves its arena, or a PE that the network reaches is read into memory outside the arena.
        """
        transfers = []
        for read in self._in_turn(reads):
            if read.nbytes:
                place, peer = self._place(read, read.nbytes)
                self._check_local(read, read.into, peer)
                transfers.append((read.into, place, peer, read.nbytes, 0, 0, 0, read.pe))
        return self._launches(transfers)

    def writes(self, writes: Sequence[Write]) -> Iterator[Launch]:
        """Launches for ``writes``.

        Raises:
            ValueError: as :meth:`reads`; or a signal is not aligned, or negative.
        """
        transfers = []
        for write in self._in_turn(writes):
            if write.nbytes or write.signal is not None:
                place, peer = self._place(write, write.nbytes)
                self._check_local(write, write.source, peer)
                signal, peer_signal = (0, 0) if write.signal is None else self._word(write.pe, write.signal, write.value, write)
                transfers.append((write.source, place, peer, write.nbytes, signal, peer_signal, write.value, write.pe))
        return self._launches(transfers)

    def signals(self, signals: Sequence[Signal]) -> Iterator[Launch]:
        """Launches for ``signals``.

        Raises:
            ValueError: a word is not aligned, lies outside the arena, or would be negative.
        """
        transfers = []
        for item in self._in_turn(signals):
            self._check_pe(item)
            word, peer = self._word(item.pe, item.offset, item.value, item)
            transfers.append((0, 0, 0, 0, word, peer, item.value, item.pe))
        return self._launches(transfers)

    def waits(self, waits: Sequence[Wait]) -> Iterator[list[tuple[int, int, int]]]:
        """Batches of ``(address, at least, PE)``.

        Raises:
            ValueError: as :meth:`signals`.
        """
        items = []
        for wait in waits:
            self._check_pe(wait)
            items.append((self._word(self.rank, wait.offset, wait.at_least, wait)[0], wait.at_least, wait.pe))
        return (items[i : i + self.batch] for i in range(0, len(items), self.batch))

    def _in_turn(self, items: Sequence[_Item]) -> list[_Item]:
        # The next higher PE first, so that the PEs do not all begin with PE 0; several for one PE keep their order.
        return sorted(items, key=lambda item: (item.pe - self.rank - 1) % len(self.peers))

    def _launches(self, transfers: list[Transfer]) -> Iterator[Launch]:
        for i in range(0, len(transfers), self.batch):
            batch = transfers[i : i + self.batch]
            rows = -(-max(t[3] for t in batch) // ROW_BYTES)
            yield Launch(batch, max(1, min(self.max_blocks // len(batch), rows)))

    def _place(self, item: Read | Write, nbytes: int) -> tuple[int, int]:
        self._check_pe(item)
        if nbytes < 0 or item.offset < 0 or item.offset + nbytes > self.nbytes:
            raise ValueError(f"PE {self.rank}: {item} leaves the arena of {self.nbytes} bytes")
        peer = self.peers[item.pe]
        return self.base + item.offset, peer + item.offset if peer else 0

    def _word(self, pe: int, offset: int, value: int, item: Write | Signal | Wait) -> tuple[int, int]:
        if offset % WORD_BYTES or offset < 0 or offset + WORD_BYTES > self.nbytes:
            raise ValueError(f"PE {self.rank}: {item}: a word lies at a multiple of 8 bytes inside the arena of {self.nbytes} bytes")
        if not 0 <= value < 1 << 63:
            raise ValueError(f"PE {self.rank}: {item}: a word is from 0 to 2**63 - 1")
        peer = self.peers[pe]
        return self.base + offset, peer + offset if peer else 0

    def _check_pe(self, item: Read | Write | Signal | Wait) -> None:
        if not 0 <= item.pe < len(self.peers):
            raise ValueError(f"PE {self.rank}: {item}: there are PEs 0 to {len(self.peers) - 1}")

    def _check_local(self, item: Read | Write, address: int, peer: int) -> None:
        if not peer and item.nbytes and not self.contains(address, item.nbytes):
            raise ValueError(f"PE {self.rank}: {item}: the network reaches memory of the arena only, and this address lies outside")
