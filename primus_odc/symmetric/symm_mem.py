"""Arenas in device memory: one allocation per rank, mapped by every peer (``torch.distributed._symmetric_memory``).

The control words stay in host memory (:mod:`primus_odc.symmetric.host`): hosts read them, device streams write them. So this transport
serves the ranks of one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from primus_odc.errors import OdcError
from primus_odc.symmetric.network import Network
from primus_odc.symmetric.stream_words import StreamWriter


class DeviceMemory:
    """This rank's arena on its device, views of everybody's, and words written from streams.

    Args:
        nbytes: size of each rank's arena, equal on all ranks.
        rank: this rank's heap rank.
        group: the ranks that share the arena; the rendezvous is collective over them.
        places: the place in ``group`` of every heap rank.
        device: this rank's device.
        words: the block of control words in host memory of each rank that this one writes words of: its own, and those of ranks taken to
            be in another node (uint8, page-aligned).

    Attributes:
        arenas: one uint8 tensor ``[nbytes]`` per rank.
        network: none: all ranks are of one machine.
    """

    network: Network | None = None

    def __init__(
        self,
        nbytes: int,
        rank: int,
        group: dist.ProcessGroup,
        places: Sequence[int],
        device: torch.device,
        words: Mapping[int, torch.Tensor],
    ) -> None:
        # Imported here: a build of torch without CUDA or ROCm need not have it.
        import torch.distributed._symmetric_memory as symmetric_memory

        free, _ = torch.cuda.mem_get_info(device)
        if nbytes > free:
            raise OdcError(
                f"{device}: the arena needs {nbytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free; use odc.accumulate: owner, more "
                "ranks, or attach before other allocations"
            )
        self._device = device
        self._local = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._local.zero_()  # padding of shards is compared too
        self.synchronize()  # or what a peer writes after the rendezvous could be zeroed
        self._handle = symmetric_memory.rendezvous(self._local, group)
        self.arenas = {
            r: self._local if r == rank else self._handle.get_buffer(place, (nbytes,), torch.uint8) for r, place in enumerate(places)
        }
        self._writers = {r: StreamWriter(block, device) for r, block in words.items()}

    def store(self, rank: int, offset: int, value: int) -> None:
        """Write a word, ``offset`` bytes into the block of ``rank``, after what the current stream has been given so far."""
        self._writers[rank].write(offset, value)

    def synchronize(self) -> None:
        """Wait for this device's own work; it never includes a peer's."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Stop writing words; call after the last view of the arena was used."""
        for writer in self._writers.values():
            writer.close()
