"""Exchange one number per rank of a shard group through the heap, without a collective."""

from __future__ import annotations

import struct

from primus_odc.primitives.driver import run
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.symmetric.heap import SymmetricHeap


def exchange_scalar(heap: SymmetricHeap, protocol: RankProtocol, value: float, operation: str) -> list[float]:
    """``value`` of every rank of the shard group, fp64, in shard order; every rank of the group makes the call."""
    place = 0

    def put(parity: int) -> None:
        nonlocal place
        place = parity
        heap.words.put("scalar", struct.unpack("=q", struct.pack("=d", value))[0], parity)

    run(heap, protocol.exchange(put, operation))
    bits = [heap.read(*protocol.scalar_of(r, place), afresh=True) for r in protocol.t.peers]
    return [struct.unpack("=d", struct.pack("=q", b))[0] for b in bits]
