"""A library of one process: PEs are threads, arenas are host memory, a launch is carried out at once. Stands in for the native module, so
that what Python does around it is tested without a GPU; what the kernels do is not (tests/gpu)."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from primus_odc.symmetric.shmem import memory, network
from primus_odc.symmetric.shmem.memory import ShmemMemory

CPU = torch.device("cpu")


class FakeLibrary:
    """All PEs; ``module(rank)`` is the native module of one."""

    def __init__(self, ranks: int) -> None:
        self.made: list[list[Arena]] = [[] for _ in range(ranks)]
        """By PE, in order."""

        self.released = [0] * ranks
        self.started = [0] * ranks
        self.full = False
        """The heap has no room any more."""

        self.mapping = list(range(ranks))
        """PE -> whose memory a mapping of it shows; a wrong entry is a wrong mapping."""

        self.together = threading.Barrier(ranks)
        self._modules: dict[int, Any] = {}

    @property
    def arenas(self) -> list[Arena]:
        """The last one of each PE."""
        return [made[-1] for made in self.made]

    def module(self, rank: int) -> Any:
        """Always the same, as modules are."""
        return self._modules.setdefault(rank, self._make_module(rank))

    def _make_module(self, rank: int) -> Any:
        def init(rank: int, ranks: int, id: bytes) -> None:
            self.started[rank] += 1
            self.together.wait(20)

        return SimpleNamespace(
            BATCH=4,
            SOURCES=3,
            initialized=lambda: self.started[rank] > 0,
            unique_id=lambda: b"id",
            init=init,
            rank=lambda: rank,
            load_kernels=lambda code_object: None,
            Arena=lambda nbytes: Arena(self, rank, nbytes),
            view=lambda address, nbytes, kind, device: torch.from_numpy(bytes_at(address, nbytes)).__dlpack__(),
        )


class HostArena:
    """One PE's arena in host memory, with the functions of the native class; where the others' lie says a subclass."""

    def __init__(self, memory: np.ndarray) -> None:
        self.bytes = memory
        self._state = (0, 0, 0, 0, 0)
        self.launches: list[int] = []
        self.puts: list[list[tuple[int, int, int]]] = []
        """Launches of puts through the network: (PE, bytes, value of the signal or 0) of each."""

    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def _there(self, pe: int, symmetric: int) -> int:
        """Where the same place in the arena of ``pe`` is."""
        raise NotImplementedError

    def status(self) -> tuple[int, int, int, int, int]:
        return self._state

    def get(self, transfers: Sequence[tuple[int, ...]], blocks: int, stream: int) -> None:
        self._move(transfers, put=False)

    def put(self, transfers: Sequence[tuple[int, ...]], blocks: int, stream: int) -> None:
        through = [(pe, nbytes, value if signal else 0) for _, _, peer, nbytes, signal, _, value, pe in transfers if not peer]
        self.puts += [through] if through else []
        self._move(transfers, put=True)

    def _move(self, transfers: Sequence[tuple[int, ...]], *, put: bool) -> None:
        assert 1 <= len(transfers) <= 4
        if self._state[0]:
            return
        self.launches.append(len(transfers))
        for local, symmetric, peer, nbytes, signal, _, value, pe in transfers:
            there = peer or self._there(pe, symmetric)
            if nbytes:
                ctypes.memmove(*((there, local) if put else (local, there)), nbytes)
            if put and signal and not peer:  # as the kernel: behind the data on the same connection
                _words(self._there(pe, signal))[0] = value

    def signal(self, transfers: Sequence[tuple[int, ...]], stream: int) -> None:
        for _, _, _, _, signal, peer_signal, value, pe in transfers:
            if not self._state[0]:
                _words(peer_signal or self._there(pe, signal))[0] = value

    def wait(self, waits: Sequence[tuple[int, int, int]], timeout_ms: int, stream: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        for address, at_least, pe in waits:
            while not self._state[0] and _words(address)[0] < at_least:
                if time.monotonic() > deadline:
                    self._state = (1, pe, address - self.address(), at_least, int(_words(address)[0]))
                time.sleep(0)

    def sum(self, wide: bool, out: int, sources: Sequence[int], count: int, add: bool, blocks: int, stream: int) -> None:
        assert 1 <= len(sources) <= 3 and blocks >= 1
        dtype = np.float64 if wide else np.float32
        total, *addends = (bytes_at(address, count * np.dtype(dtype).itemsize).view(dtype) for address in (out, *sources))
        if not add:
            total[:] = 0
        for addend in addends:
            total += addend

    def fill_pattern(self, to: int, nbytes: int, seed: int, stream: int) -> None:
        bytes_at(to, nbytes)[:] = _pattern(nbytes, seed)

    def check_pattern(self, source: int, nbytes: int, seed: int, pe: int, stream: int) -> None:
        differs = np.flatnonzero(bytes_at(source, nbytes) != _pattern(nbytes, seed))
        if len(differs) and not self._state[0]:
            first = int(differs[0])
            found, expected = int(bytes_at(source, nbytes)[first]), int(_pattern(nbytes, seed)[first])
            self._state = (2, pe, source + first - self.address(), expected, found)


class Arena(HostArena):
    """Of a PE that is a thread."""

    def __init__(self, library: FakeLibrary, rank: int, nbytes: int) -> None:
        if library.full:
            raise RuntimeError(f"no {nbytes} bytes in the symmetric heap")
        super().__init__(np.full(nbytes, 0xEE, np.uint8))
        self._library = library
        self._rank = rank
        self._number = len(library.made[rank])
        library.made[rank].append(self)
        library.together.wait(20)

    def peer_address(self, pe: int) -> int:
        return self._peer(self._library.mapping[pe]).address()

    def _peer(self, pe: int) -> Arena:
        return self._library.made[pe][self._number]

    def _there(self, pe: int, symmetric: int) -> int:
        return self._peer(pe).address() + symmetric - self.address()

    def release(self) -> None:
        self._library.released[self._rank] += 1
        self._library.together.wait(20)


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """Memory at an address, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _words(address: int) -> np.ndarray:
    return bytes_at(address, 8).view(np.uint64)


def _pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Stream:
    """A stream on which everything has been done."""

    cuda_stream = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)


class HostWriter:
    """Stands in for :class:`StreamWriter`: stores words at once."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._words = memory.view(torch.int64)
        self.closed = False

    def write(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    def close(self) -> None:
        self.closed = True


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let :class:`ShmemMemory` and :class:`LibraryMemory` live in host memory."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(memory, "_pinned_words", lambda count: torch.empty(count, dtype=torch.int64))
    monkeypatch.setattr(network, "StreamWriter", HostWriter)
    thread = threading.local()
    monkeypatch.setattr(memory, "load_extension", lambda name: thread.module)
    monkeypatch.setattr(memory, "prepare_environment", lambda name, **options: None)
    monkeypatch.setattr(memory, "_this_thread", thread, raising=False)


class Job:
    """The store and the library that threads as PEs share."""

    def __init__(self, nodes: Sequence[int], timeout_s: float = 10.0) -> None:
        self.nodes = list(nodes)
        self.library = FakeLibrary(len(nodes))
        self.store = HashStore()
        self.timeout_s = timeout_s
        self.names = [f"rank {r}" for r in range(len(nodes))]

    def enter(self, rank: int) -> None:
        """This thread is ``rank`` from here on."""
        vars(memory)["_this_thread"].module = self.library.module(rank)

    def memory(self, rank: int, nbytes: int, start: int = 1) -> ShmemMemory:
        """The memory of ``rank``; in its own thread, since all PEs make theirs together. ``start`` numbers the memories of a process."""
        self.enter(rank)
        store = PrefixStore(f"start{start}", self.store)
        return ShmemMemory("nvshmem", nbytes, rank, self.names, self.nodes, store, CPU, timeout_s=self.timeout_s)
