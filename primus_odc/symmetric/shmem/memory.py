"""The arena of one PE in the library's symmetric heap, and the operations on everybody's arenas.

An operation is work given to the current stream; the host moves no byte. What an operation moved has arrived, in both directions, for
whatever comes behind it in the stream, so a signal given after a write is stored after its data, and a read given after :meth:`wait`
sees what the word promised.

No stream waits for a peer's minibatch: the host looks at words (:meth:`words`) and gives work to a stream when its time has come.
:meth:`wait` in the stream is for what was seen by the host or cannot fail to come; it ends after its time limit. Then nothing given later
to this arena happens, and :meth:`check` raises with the name of the peer.

What is *not* bounded in a stream is a transfer to a peer that died: a library's own completion knows no time limit. The host finds it in
:meth:`synchronize`.

Words and data share the arena; which offset means what is the caller's.

**The library stays up** from the first memory of a process to its end, with the same PEs: NVSHMEM calls a second start undefined, and
ending it is collective, which nobody may rely on after a failure. An arena that was closed is freed when the next one is made, since both
are collective.

**What the host has seen.** :meth:`words` reads with a copy engine: a kernel would have to wait for room on a device that is full of
compute. A word is below 2**32 in practice and 8-byte aligned, so its upper half never changes and a copy cannot tear it. Work that a stream
is given afterwards sees what the word covers. Where a peer's GPU stored both, because its release has system scope and a launch comes after
what its host saw. Where a network card wrote both, because the device keeps the order of such writes: :mod:`.write_order` asks CUDA for
that, and where the order is promised to the owner of the memory only, each PE shows its words itself, behind a flush. On AMD the library's
heap is uncached, so that nothing old can be read; whether the order of a card's writes is kept there is unproved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import NoReturn

import numpy as np
import torch
from torch.distributed import Store

from primus_odc.errors import OdcError, PeerTimeoutError, VerificationError
from primus_odc.symmetric.arena import align
from primus_odc.symmetric.gathering import Gathering, ends_in_time
from primus_odc.symmetric.shmem import code_object
from primus_odc.symmetric.shmem.environment import HEAP_SIZE, heap_nbytes, prepare_environment
from primus_odc.symmetric.shmem.extension import Library, load_extension
from primus_odc.symmetric.shmem.plan import WORD_BYTES, ArenaMap, Read, Signal, Wait, Write
from primus_odc.symmetric.shmem.running import running_library
from primus_odc.symmetric.shmem.write_order import flush_writes, needs_relay

PROBE_BYTES = 4099
"""Of the start-up pattern test, for each pair and direction: more than a page, and odd."""

_PROBE_STRIDE = align(PROBE_BYTES)
_DLPACK_CUDA, _DLPACK_ROCM = 2, 10
_WAIT_TIMED_OUT, _PATTERN_DIFFERS = 1, 2
_REDUCE_BLOCKS = 64
_REDUCE_BLOCK_BYTES = 512 * 16


def arena_bytes(nbytes: int, pes: int) -> int:
    """What an arena of ``nbytes`` takes of the heap: with the places and words of the start-up test of ``pes`` PEs."""
    return align(nbytes) + 3 * pes * _PROBE_STRIDE + align(pes * WORD_BYTES)


def _pinned_words(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)


class ShmemMemory:
    """One PE's arena (construction is collective over all PEs).

    Args:
        library: ``nvshmem`` or ``mori``.
        nbytes: size of the arena, equal on all PEs.
        rank: this PE.
        names: how each PE is called in messages; as many as there are PEs.
        nodes: the node of every PE, any numbers; PEs of one node reach each other through mapped memory, others through the network.
        store: the job's torch store, in a namespace of its own (``PrefixStore``).
        device: this PE's GPU.
        timeout_s: limit of every wait.
        interface: network interface for start-up (``odc.interface``); None: the library's choice.
        nic: kind of network card (``odc.nic``), for MORI; None: found out.

    Attributes:
        arena: this PE's bytes, uint8 ``[nbytes]`` on ``device``, zeroed before any peer could write.
        machines: how many machines the PEs run on.
        relays: whether PEs of a node may not look at each other's words, but each has to show its own behind :meth:`make_visible`.
        by_stores: PEs of other nodes that the library itself writes to by stores: GPUs of one machine taken for nodes, or machines that
            share NVLink. There a write is as fast as it has blocks; a network card needs one block.

    Raises:
        OdcError: the library cannot be used here, with what to change; see the modules beside this one.
        PeerTimeoutError: a PE is missing.
        VerificationError: the start-up pattern test found a wrong mapping or a stale read.
    """

    def __init__(
        self,
        library: Library,
        nbytes: int,
        rank: int,
        names: Sequence[str],
        nodes: Sequence[int],
        store: Store,
        device: torch.device,
        *,
        timeout_s: float,
        interface: str | None = None,
        nic: str | None = None,
    ) -> None:
        self.rank = rank
        self.names = list(names)
        self.timeout_s = timeout_s
        self._device = device
        pes = len(self.names)
        self._probe = align(nbytes)
        total = arena_bytes(nbytes, pes)
        self._extension: ModuleType = load_extension(library)
        kernels = str(code_object.code_object(self._target(nic))) if library == "mori" else ""
        self._gathering = Gathering(store, rank, self.names, timeout_s)
        use_device = partial(torch.cuda.set_device, device)

        def prepare(machines: int, used: str | None) -> None:
            prepare_environment(library, arena_nbytes=total, pes=pes, machines=machines, interface=used, environment=os.environ)

        self._library, first = running_library(self._extension, self._gathering, interface, prepare, use_device)
        self.machines = self._library.machines
        self.relays = (
            library == "nvshmem"
            and self.machines > 1
            and needs_relay(device, self.names[rank], read_by_mates=list(nodes).count(nodes[rank]) > 1)
        )
        closed = self._library.closed_everywhere(self._gathering)

        def allocate() -> None:
            use_device()
            if first:
                self._extension.load_kernels(kernels)
            for arena in closed:
                arena.release()
            try:
                self._arena = self._extension.Arena(total)
            except RuntimeError as error:
                free = torch.cuda.mem_get_info(device)[0] / 2**30
                told = f"{error}; {free:.2f} GiB of {device} are free"
                if not first:
                    told += (
                        f". Where the heap keeps the size that the process's first engine needed, set {HEAP_SIZE[library]} to what all "
                        f"engines need together, this one {heap_nbytes(total)}, before the first is attached"
                    )
                raise OdcError(told) from error

        self._gathering.together("allocated", allocate)
        self._library.made(self._arena)
        mapped = [self._arena.peer_address(pe) if nodes[pe] == nodes[rank] else 0 for pe in range(pes)]
        self.by_stores = frozenset(pe for pe, address in enumerate(mapped) if not address and self._arena.peer_address(pe))
        mapped[rank] = self._arena.address()
        self.map = ArenaMap(rank, total, tuple(mapped), batch=self._extension.BATCH)
        whole = self._view(self.map.base, total)
        whole.zero_()
        self.arena = whole[:nbytes]
        self._host_words = _pinned_words(512)
        self._words_stream = torch.cuda.Stream(device, priority=-1)
        self.synchronize("start-up")
        self._gathering.meet("zeroed")
        self._check_mapping()

    def peer(self, pe: int) -> torch.Tensor | None:
        """The arena of ``pe``, uint8 ``[nbytes]``, where it is mapped here; else None."""
        address = self.map.peers[pe]
        return self._view(address, self.arena.numel()) if address else None

    def get(self, reads: Sequence[Read]) -> None:
        """Read from arenas; from PEs of other nodes into this arena only."""
        for launch in self.map.reads(reads):
            self._arena.get(launch.transfers, launch.blocks, self._stream())

    def put(self, writes: Sequence[Write]) -> None:
        """Write into arenas, and store a word behind each write that has a signal; to PEs of other nodes from this arena only."""
        for launch in self.map.writes(writes):
            self._arena.put(launch.transfers, launch.blocks, self._stream())
            if launch.signals_mapped:
                mapped = [t for t in launch.transfers if t[2] and t[4]]
                self._arena.signal(mapped, self._stream())

    def signal(self, signals: Sequence[Signal]) -> None:
        """Store words, behind everything given to this stream before."""
        for launch in self.map.signals(signals):
            self._arena.signal(launch.transfers, self._stream())

    def wait(self, waits: Sequence[Wait], timeout_s: float | None = None) -> None:
        """Hold the stream until all these words of this arena got there, ``timeout_s`` at most (default: that of this memory)."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        for batch in self.map.waits(waits):
            self._arena.wait(batch, max(1, int(limit * 1000)), self._stream())

    def reduce(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """``out`` := the sum of ``sources`` in the order given, zeros for none.

        Args:
            out: contiguous, fp32 or fp64, any shape.
            sources: contiguous, of the dtype and number of elements of ``out``; anything this device can read: mapped arenas, pieces that
                arrived in this one.
        """
        for tensor in (out, *sources):
            if tensor.dtype != out.dtype or tensor.numel() != out.numel() or not tensor.is_contiguous():
                raise ValueError(f"reduce: {tuple(tensor.shape)} {tensor.dtype} does not fit {tuple(out.shape)} {out.dtype}, contiguous")
        if out.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"reduce: sums are of float32 or float64, not {out.dtype}")
        if not sources:
            out.zero_()
        blocks = max(1, min(_REDUCE_BLOCKS, -(-out.nbytes // _REDUCE_BLOCK_BYTES)))
        most = self._extension.SOURCES
        for first in range(0, len(sources) if out.numel() else 0, most):
            addresses = [s.data_ptr() for s in sources[first : first + most]]
            wide = out.dtype == torch.float64
            self._arena.sum(wide, out.data_ptr(), addresses, out.numel(), first > 0, blocks, self._stream())

    def words(self, offset: int, count: int, pe: int | None = None) -> np.ndarray:
        """``count`` 64-bit words from ``offset`` on, as they have been stored by now: int64 ``[count]``.

        The host's way to look at them: a copy on a stream of its own, which waits for nothing.

        Args:
            pe: whose arena, one that is mapped here; None: this PE's own.
        """
        if offset % WORD_BYTES or offset < 0 or offset + count * WORD_BYTES > self.map.nbytes:
            raise ValueError(f"{count} words from byte {offset}: words lie at multiples of 8 bytes inside the arena")
        address = self.map.peers[self.rank if pe is None else pe]
        if not address:
            raise ValueError(f"words of {self.names[pe or 0]}: its arena is not mapped here")
        if count > self._host_words.numel():
            self._host_words = _pinned_words(2 * count)
        found = self._host_words[:count]
        with torch.cuda.stream(self._words_stream):
            found.copy_(self._view(address + offset, count * WORD_BYTES).view(torch.int64), non_blocking=True)
        self._finish(self._words_stream, "reading words")
        return found.numpy().copy()

    def make_visible(self) -> None:
        """What the network has written into this PE's arena, as far as its words were looked at, is seen by the other GPUs of the node."""
        if self.relays:
            flush_writes(self._device)

    def check(self, operation: str) -> None:
        """Raise what a kernel reported; costs a load from host memory.

        Raises:
            PeerTimeoutError: a word did not come.
            VerificationError: a pattern differs.
        """
        code, who, what, expected, found = self._arena.status()
        me = self.names[self.rank]
        if code == _WAIT_TIMED_OUT:
            raise PeerTimeoutError(
                f"{me}: {operation}: {self.names[who]} did not store {expected} in time in the word at byte {what} of this rank's arena: "
                f"it is {found}"
            )
        if code == _PATTERN_DIFFERS:
            raise VerificationError(
                f"{me}: {operation}: pattern test with {self.names[who]}: byte {what} of this rank's arena is {found:#04x}, expected "
                f"{expected:#04x}: its memory is mapped wrongly, or what was read is old"
            )
        if code:
            raise OdcError(f"{me}: {operation}: a kernel reported failure {code} at byte {what}")

    def synchronize(self, operation: str) -> None:
        """Wait for the current stream, ``timeout_s`` at most, and :meth:`check`."""
        self._finish(torch.cuda.current_stream(self._device), operation)
        self.check(operation)

    def drain(self, operation: str) -> None:
        """As :meth:`synchronize`, for all streams of the device."""
        if not ends_in_time(partial(torch.cuda.synchronize, self._device), operation, self.timeout_s):
            self._late(operation)
        self.check(operation)

    def close(self) -> None:
        """Wait for this device and give the arena up; waits for no peer. Peers may still write into it: it is freed when all have closed
        theirs, with the next memory that is made."""
        self.drain("close")
        self._library.close(self._arena)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _finish(self, stream: torch.cuda.Stream, operation: str) -> None:
        done = stream.record_event()
        deadline = time.monotonic() + self.timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                self._late(operation)
            time.sleep(0)

    def _late(self, operation: str) -> NoReturn:
        self.check(operation)
        raise PeerTimeoutError(
            f"{self.names[self.rank]}: {operation}: the GPU did not finish in {self.timeout_s:g} s; a transfer to a peer that died does "
            "not end by itself"
        )

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        kind = _DLPACK_ROCM if torch.version.hip is not None else _DLPACK_CUDA
        view: torch.Tensor = torch.from_dlpack(self._extension.view(address, nbytes, kind, self._device.index))
        return view

    def _target(self, nic: str | None) -> code_object.Target:
        arch = str(torch.cuda.get_device_properties(self._device).gcnArchName).split(":")[0]
        card = nic or code_object.detect_nic()
        return code_object.Target(arch, card, code_object.detect_ccqe(card))

    def _check_mapping(self) -> None:
        """Every pair, both directions, through the real paths: each PE reads from every other what that one wrote for it, and gets the same
        written into its own arena with a signal. Twice, with other bytes, so that an old read is found too."""
        pes = range(len(self.names))
        kept, pulled, pushed = (self._probe + i * len(pes) * _PROBE_STRIDE for i in range(3))
        arrived = self._probe + 3 * len(pes) * _PROBE_STRIDE
        base = self.map.base
        for turn in (1, 2):

            def seed(writer: int, reader: int, turn: int = turn) -> int:
                return turn << 48 | writer << 24 | reader

            for pe in pes:
                self._arena.fill_pattern(base + kept + pe * _PROBE_STRIDE, PROBE_BYTES, seed(self.rank, pe), self._stream())
            self.synchronize("start-up pattern test")
            self._gathering.meet(f"pattern {turn} written")
            mine, slot = self.rank * _PROBE_STRIDE, _PROBE_STRIDE
            self.get([Read(pe, kept + mine, base + pulled + pe * slot, PROBE_BYTES) for pe in pes])
            self.put([Write(pe, pushed + mine, base + kept + pe * slot, PROBE_BYTES, arrived + WORD_BYTES * self.rank, turn) for pe in pes])
            self.wait([Wait(pe, arrived + WORD_BYTES * pe, turn) for pe in pes])
            for pe in pes:
                for place in (pulled, pushed):
                    self._arena.check_pattern(base + place + pe * slot, PROBE_BYTES, seed(pe, self.rank), pe, self._stream())
            self.synchronize("start-up pattern test")
            self._gathering.meet(f"pattern {turn} checked")
