"""Exchange one number per rank of a shard group through the heap, without a collective.

A number travels in one 64-bit word together with a tag of 12 bits, which takes the place of the lowest bits of its fraction: 40 bits are
left of the fraction (a relative 1e-12), and infinities and NaNs stay what they are. The tag says what the number is of, so that ranks
which exchange different things find out.
"""

from __future__ import annotations

import struct

from primus_odc.primitives.driver import run
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.symmetric.heap import SymmetricHeap

TAGS = 1 << 12
"""Tags are whole numbers below this."""


def exchange_scalar(heap: SymmetricHeap, protocol: RankProtocol, value: float, tag: int, operation: str) -> list[tuple[float, int]]:
    """``value`` and ``tag`` of every rank of the shard group, in shard order; every rank of the group makes the call."""
    place = 0

    def put(parity: int) -> None:
        nonlocal place
        place = parity
        heap.words.put("scalar", join(value, tag), parity)

    run(heap, protocol.exchange(put, operation))
    return [part(heap.read(*protocol.scalar_of(r, place), afresh=True)) for r in protocol.t.peers]


def join(value: float, tag: int) -> int:
    """The word, as a signed 64-bit number."""
    assert 0 <= tag < TAGS
    (bits,) = struct.unpack("=q", struct.pack("=d", value))
    return int(bits) & ~(TAGS - 1) | tag


def part(word: int) -> tuple[float, int]:
    """Value and tag of a word."""
    (value,) = struct.unpack("=d", struct.pack("=q", word & ~(TAGS - 1)))
    return value, word & (TAGS - 1)
