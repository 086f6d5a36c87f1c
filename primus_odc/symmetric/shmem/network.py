"""The heap's device memory on a library: mates of the node by mapped addresses, other nodes by puts with signals.

In each rank's arena lie the regions of the heap and, behind them, its *far words*: those that ranks of other nodes store. Words of the own
node lie in host memory, as with every transport. Nothing is read from another node.

A put waits in its stream until the other side has acknowledged, so what a rank sends arrives in the order in which it was given to one
stream; the data plane has a stream for it (:attr:`primus_odc.primitives.lanes.Lanes.sends`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import Store

from primus_odc.errors import OdcError
from primus_odc.symmetric.arena import align
from primus_odc.symmetric.shmem.extension import Library
from primus_odc.symmetric.shmem.memory import ShmemMemory
from primus_odc.symmetric.shmem.plan import WORD_BYTES, Write, cut
from primus_odc.symmetric.stream_words import StreamWriter


class ShmemNetwork:
    """Writes into other nodes; implements :class:`primus_odc.symmetric.network.Network`.

    Args:
        memory: the arenas.
        pes: the PE of every heap rank.
        words_at: where the far words begin, in bytes from the start of every arena.
        count: how many there are.
    """

    def __init__(self, memory: ShmemMemory, pes: Sequence[int], words_at: int, count: int) -> None:
        self._memory = memory
        self._pes = pes
        self._words_at = words_at
        self._count = count
        self.mates_look = not memory.relays
        self._collected: dict[int, list[Write]] = {}
        self._signalled: dict[int, list[Write]] = {}

    def put(self, rank: int, offset: int, source: torch.Tensor) -> None:
        """Collected until the next :meth:`signal` to ``rank``."""
        if source.dtype != torch.uint8 or not source.is_contiguous():
            raise ValueError(f"put of {source.dtype} {tuple(source.shape)}: contiguous bytes are needed")
        if not 0 <= offset <= self._words_at - source.numel():
            raise ValueError(f"put of {source.numel()} bytes at {offset} leaves the arena of {self._words_at} bytes")
        self._collected.setdefault(rank, []).append(Write(self._pes[rank], offset, source.data_ptr(), source.numel()))

    def signal(self, rank: int, position: int, value: int) -> None:
        """What was collected for ``rank`` and the word behind it are ready to leave; what was ready for it before leaves first."""
        if not 0 <= position < self._count:
            raise IndexError(f"far word {position}: there are {self._count}")
        if rank in self._signalled:
            self.submit()
        pe = self._pes[rank]
        collected = self._collected.pop(rank, None) or [Write(pe, 0, 0, 0)]
        parts = self._memory.map.batch - 1 if pe in self._memory.by_stores else 1
        writes = [part for write in collected for part in (cut(write, parts) if parts > 1 else [write])]
        self._signalled[rank] = [*writes[:-1], writes[-1]._replace(signal=self._words_at + WORD_BYTES * position, value=value)]

    def submit(self) -> None:
        """Each rank's last write with its word, all ranks in one launch, in which a word goes down the queue pair of its data; before it
        the writes before the last, which have queue pairs of their own. Where blocks move the bytes and no network card, a large write
        is cut, and all but its end goes in the launch before."""
        signalled, self._signalled = self._signalled, {}
        if earlier := [write for writes in signalled.values() for write in writes[:-1]]:
            self._memory.put(earlier)
        if signalled:
            self._memory.put([writes[-1] for writes in signalled.values()])

    def far_words(self, home: int) -> npt.NDArray[np.int64]:
        """See :meth:`ShmemMemory.words`."""
        return self._memory.words(self._words_at, self._count, self._pes[home])

    def make_visible(self) -> None:
        """See :meth:`ShmemMemory.make_visible`."""
        self._memory.make_visible()


class LibraryMemory:
    """Arenas in the library's heap (collective); implements :class:`primus_odc.symmetric.heap.Memory`.

    Args:
        library: ``nvshmem`` or ``mori``.
        nbytes: size of each rank's arena, equal on all ranks.
        far_words: their number; 0: all ranks share one node.
        rank: this heap rank.
        pes: the PE of every heap rank. A library serves one order of ranks in a process, and models may differ in theirs.
        names, nodes: of every heap rank, as those of :class:`ShmemMemory`.
        store, device, timeout_s, interface, nic: as those of :class:`ShmemMemory`.
        words: this rank's control words in host memory (uint8, page-aligned).

    Attributes:
        arenas: uint8 ``[nbytes]`` of every rank of this node.
        network: None: there are no other nodes.
    """

    def __init__(
        self,
        library: Library,
        nbytes: int,
        far_words: int,
        rank: int,
        pes: Sequence[int],
        names: Sequence[str],
        nodes: Sequence[int],
        store: Store,
        device: torch.device,
        words: torch.Tensor,
        *,
        timeout_s: float,
        interface: str | None = None,
        nic: str | None = None,
    ) -> None:
        words_at = align(nbytes)
        self._rank = rank
        by_pe = sorted(range(len(pes)), key=lambda r: pes[r])
        self._memory = ShmemMemory(
            library,
            words_at + WORD_BYTES * far_words,
            pes[rank],
            [names[r] for r in by_pe],
            [nodes[r] for r in by_pe],
            store,
            device,
            timeout_s=timeout_s,
            interface=interface,
            nic=nic,
        )
        seen = {r: self._memory.peer(pes[r]) for r, node in enumerate(nodes) if node == nodes[rank]}
        if unmapped := [names[r] for r, arena in seen.items() if arena is None]:
            raise OdcError(
                f"{names[rank]}: {library} does not map the memory of {', '.join(unmapped)}, of the same node: their GPUs need peer "
                "access; without it set odc.ranks_per_node: 1, which sends everything over the network"
            )
        self.arenas: Mapping[int, torch.Tensor] = {r: arena[:nbytes] for r, arena in seen.items() if arena is not None}
        self.network = ShmemNetwork(self._memory, pes, words_at, far_words) if far_words else None
        self._writer = StreamWriter(words, device)

    def store(self, rank: int, offset: int, value: int) -> None:
        """Store one of this rank's own words, ``offset`` bytes into its block, behind what the current stream was given."""
        if rank != self._rank:
            raise ValueError(f"a word of rank {rank} is stored by rank {self._rank}: nobody stores words of another rank of the node")
        self._writer.write(offset, value)

    def synchronize(self) -> None:
        """Wait for this device's own work, acknowledgements of other nodes included; it never includes a peer's minibatch."""
        self._memory.drain("synchronize")

    def close(self) -> None:
        """Wait for this device, stop storing words and give the arena up; waits for no peer."""
        self._memory.close()
        self._writer.close()
