"""A stand-in for device memory and a network card: arenas in files, of which a rank maps those of its own node.

Memory of other nodes is touched by the network only, from a thread: what goes to one rank arrives in order, some time later; what goes to
different ranks, in any order. Sources are read when they leave, as late as the interface allows.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from primus_odc.symmetric.heap import MakeMemory

MAX_DELAY_S = 0.001
_FLUSH_S = 20.0


class FileNetwork:
    """Implements :class:`primus_odc.symmetric.network.Network`.

    Args:
        misrouted: rank -> the one whose memory is written instead.
        hides: what arrives is seen by nobody before its owner calls :meth:`make_visible`; and mates may not look at words.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[int], rank: int, nbytes: int, words: int, misrouted: Mapping[int, int], hides: bool
    ) -> None:
        self.mates_look = not hides
        self._rank = rank
        where = folder / "hidden" if hides else folder
        where.mkdir(exist_ok=True)
        self._far_arenas = {r: _arena(where, misrouted.get(r, r), nbytes) for r, node in enumerate(nodes) if node != nodes[rank]}
        self._hidden = _arena(where, rank, nbytes)
        self._visible = _arena(folder, rank, nbytes)
        self._shown = torch.zeros(nbytes, dtype=torch.uint8)
        self._blocks = {r: _far_block(folder, r, words) for r in range(len(nodes))}
        self._near = {r for r, node in enumerate(nodes) if node == nodes[rank]}
        self._queues: dict[int, deque[Callable[[], object]]] = {r: deque() for r in self._far_arenas}
        self.looks = 0
        self._held: list[tuple[int, Callable[[], object]]] = []
        self._work, stopping = threading.Event(), threading.Event()
        thread = threading.Thread(target=_deliver, args=(self._queues, self._work, stopping, random.Random(rank)), daemon=True)
        thread.start()
        weakref.finalize(self, _stop, thread, self._work, stopping)

    def put(self, rank: int, offset: int, source: torch.Tensor) -> None:
        assert source.dtype == torch.uint8 and source.is_contiguous() and source.ndim == 1
        target = self._far_arenas[rank][offset : offset + source.numel()]
        self._send(rank, lambda: target.copy_(source))

    def signal(self, rank: int, position: int, value: int) -> None:
        block = self._blocks[rank]
        self._send(rank, lambda: block.__setitem__(position, value))

    def _send(self, rank: int, write: Callable[[], object]) -> None:
        self._held.append((rank, write))

    def submit(self) -> None:
        for rank, write in self._held:
            self._queues[rank].append(write)
        self._held.clear()
        self._work.set()

    def far_words(self, home: int) -> npt.NDArray[np.int64]:
        assert home in self._near, f"far words of rank {home} belong to another node"
        assert self.mates_look or home == self._rank, f"rank {self._rank} looks at far words of rank {home} itself"
        self.looks += 1
        return self._blocks[home].copy()

    def make_visible(self) -> None:
        assert not self.mates_look
        arrived = self._hidden.clone()
        changed = arrived != self._shown
        self._visible[changed] = arrived[changed]
        self._shown = arrived

    def flush(self) -> None:
        """Wait until everything has arrived."""
        deadline = time.monotonic() + _FLUSH_S
        while any(self._queues.values()):
            if time.monotonic() > deadline:
                raise TimeoutError("the stand-in for a network did not deliver")
            time.sleep(0.0005)


def _deliver(
    queues: Mapping[int, deque[Callable[[], object]]], work: threading.Event, stopping: threading.Event, chance: random.Random
) -> None:
    while not stopping.is_set():
        work.wait()
        work.clear()
        while busy := [queue for queue in queues.values() if queue]:
            time.sleep(chance.uniform(0, MAX_DELAY_S))
            queue = chance.choice(busy)
            queue[0]()
            queue.popleft()  # only now: what is empty has arrived


def _stop(thread: threading.Thread, work: threading.Event, stopping: threading.Event) -> None:
    stopping.set()
    work.set()
    thread.join(_FLUSH_S)


class FileMemory:
    """Implements :class:`primus_odc.symmetric.heap.Memory`."""

    def __init__(self, arenas: Mapping[int, torch.Tensor], network: FileNetwork, words: Mapping[int, torch.Tensor]) -> None:
        self.arenas = arenas
        self.network = network
        self._words = {r: block.numpy().view(np.int64) for r, block in words.items()}

    def store(self, rank: int, offset: int, value: int) -> None:
        self._words[rank][offset // 8] = value

    def synchronize(self) -> None:
        self.network.flush()

    def close(self) -> None:
        self.network.flush()


def in_files(
    folder: Path,
    nodes: Sequence[int],
    rank: int,
    exchange: Callable[[Any], list[Any]],
    misrouted: Mapping[int, int] | None = None,
    *,
    hides: bool = False,
) -> MakeMemory:
    """What a heap makes its memory with; ``exchange`` is that of the heap."""

    def make(nbytes: int, words: Mapping[int, torch.Tensor], far_words: int) -> FileMemory:
        own = _arena(folder, rank, nbytes)
        own.zero_()
        _far_block(folder, rank, far_words)[:] = 0
        if hides:
            (folder / "hidden").mkdir(exist_ok=True)
            _arena(folder / "hidden", rank, nbytes).zero_()
        exchange("made")
        arenas = {r: own if r == rank else _arena(folder, r, nbytes) for r, node in enumerate(nodes) if node == nodes[rank]}
        network = FileNetwork(folder, nodes, rank, nbytes, far_words, misrouted or {}, hides)
        return FileMemory(arenas, network, {rank: words[rank]})

    return make


def _arena(folder: Path, rank: int, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(folder / f"arena.{rank}"), shared=True, size=nbytes, dtype=torch.uint8)


def _far_block(folder: Path, rank: int, words: int) -> npt.NDArray[np.int64]:
    return torch.from_file(str(folder / f"far.{rank}"), shared=True, size=words, dtype=torch.int64).numpy()
