"""Start-up pattern test: every pair of ranks, before the first step.

In a node every rank writes a value derived from (writer, reader) into its own arena and into every mate's, and every rank checks what it
reads in both directions, so a wrong mapping or a stale view is found. Of other nodes' memory nothing is read: there each rank puts such a
value through the network, signals, and checks what came. Nobody starts before all are content, for a rank that sees nothing wrong itself
may be the one whose writes go astray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primus_odc.errors import OdcError

if TYPE_CHECKING:
    from primus_odc.symmetric.heap import SymmetricHeap

PROBE = "heap.probe"
FAR_WORD = "heap.far_mapped"
_WHAT = "start-up pattern test"


def probe_bytes(world_size: int) -> int:
    """Size of the region :data:`PROBE`: a value for each reader, and one from each writer."""
    return 2 * 8 * world_size


def check_mapping(heap: SymmetricHeap) -> None:
    """Run it on this rank (collective).

    Raises:
        OdcError: a value is not what its writer wrote; the message says whose.
    """
    probe = heap.plan.regions[PROBE]

    def cells(rank: int) -> torch.Tensor:
        return heap.view(rank, probe).view(torch.int64).view(2, heap.world_size)

    mine, mates = cells(heap.rank), heap.near
    far = [r for r in range(heap.world_size) if r not in mates]
    for reader in range(heap.world_size):
        mine[0, reader] = _value(heap.rank, reader)  # for a mate to pull, for others to be put
        if reader in mates:
            cells(reader)[1, heap.rank] = _value(heap.rank, reader)
    heap.synchronize()
    for reader in far:
        value = heap.view(heap.rank, probe)[8 * reader : 8 * reader + 8]
        heap.put(reader, probe, value, 8 * (heap.world_size + heap.rank))
        heap.signal(reader, FAR_WORD, 1, heap.rank)
    heap.words.write("mapped", 1)
    for mate in mates:
        heap.wait(mate, "mapped", 0, 1, _WHAT)
        _check(heap, mate, pulled=int(cells(mate)[0, heap.rank]), pushed=int(mine[1, mate]))
    for writer in far:
        for mate in mates:  # whose far words this rank will read too
            heap.wait(writer, FAR_WORD, writer, 1, _WHAT, home=mate)
        _check(heap, writer, put=int(mine[1, writer]))
    heap.words.write("mapped", 2)
    for reader in far:
        heap.signal(reader, FAR_WORD, 2, heap.rank)
    for mate in mates:
        heap.wait(mate, "mapped", 0, 2, _WHAT)
    for writer in far:
        heap.wait(writer, FAR_WORD, writer, 2, _WHAT, home=heap.rank)


def _value(writer: int, reader: int) -> int:
    return 0x5D0C << 32 | writer << 16 | reader


def _check(heap: SymmetricHeap, peer: int, **found: int) -> None:
    expected = _value(peer, heap.rank)
    if any(value != expected for value in found.values()):
        what = ", ".join(f"{how} {value:#x}" for how, value in found.items())
        raise OdcError(
            f"{heap.names[heap.rank]}: {_WHAT} with {heap.names[peer]} failed: {what}, expected {expected:#x}: its memory is mapped wrongly"
        )
