"""Control words: the only thing ranks synchronise on.

Every rank owns one block of 64-bit signed words in its own shared segment. A word has exactly one writer. That is the rank that owns the
block, and every peer of its node may read it; or one rank of another node that signals into the block of its reader
(:mod:`primus_odc.symmetric.far_words`, unless the nodes are one machine's). Words only ever grow, and nobody performs a read-modify-write
on them, so an aligned 64-bit store and load are all the hardware support that is needed:

* a writer finishes the data a word covers, then stores the word;
* a reader loads the word, then reads the data.

On x86-64 stores are seen in program order and loads are not reordered with older loads (Intel SDM vol. 3A, 8.2.2), which is exactly
this release/acquire pair. Other architectures need explicit barriers, which Python cannot express: the host transport refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from primus_odc.errors import ProtocolError

WORD_BYTES = 8


@dataclass(frozen=True)
class WordLayout:
    """Where each named word (or array of words) stands in a rank's block; the same on every rank."""

    offsets: Mapping[str, int]
    lengths: Mapping[str, int]
    total: int

    @classmethod
    def of(cls, lengths: Mapping[str, int]) -> WordLayout:
        """Lay out ``{name: number of words}`` in the order given."""
        offsets: dict[str, int] = {}
        total = 0
        for name, length in lengths.items():
            if length < 0:
                raise ValueError(f"word {name!r} has negative length {length}")
            offsets[name] = total
            total += length
        return cls(offsets, dict(lengths), total)

    def position(self, name: str, index: int) -> int:
        """Position of ``name[index]`` in a block, in words."""
        if not 0 <= index < self.lengths[name]:
            raise IndexError(f"word {name}[{index}] is outside its length {self.lengths[name]}")
        return self.offsets[name] + index

    @property
    def nbytes(self) -> int:
        return self.total * WORD_BYTES


class Words:
    """The blocks of all ranks of a node, as seen from rank ``rank``.

    Args:
        layout: the common layout.
        blocks: by rank, of all that are mapped here: an int64 array of ``layout.total`` words, from that rank's segment.
        rank: the rank whose block this process writes.
    """

    def __init__(self, layout: WordLayout, blocks: Mapping[int, npt.NDArray[np.int64]], rank: int) -> None:
        for r, block in blocks.items():
            if block.dtype != np.int64 or block.shape != (layout.total,) or block.ctypes.data % WORD_BYTES:
                raise ValueError(f"block of rank {r} is not an aligned int64 array of {layout.total} words")
        self.layout = layout
        self.rank = rank
        self._blocks = blocks

    def read(self, rank: int, name: str, index: int = 0) -> int:
        """Load one word of any rank that is mapped."""
        return int(self._blocks[rank][self.layout.position(name, index)])

    def write(self, name: str, value: int, index: int = 0) -> None:
        """Store one of this rank's own words.

        Raises:
            ProtocolError: the word would decrease; a monotonic word that shrinks means two writers or a broken state machine.
        """
        self.signal(self.rank, name, value, index)

    def signal(self, rank: int, name: str, value: int, index: int = 0) -> None:
        """Store a word in the block of ``rank`` whose one writer is this rank.

        Raises:
            ProtocolError: as for :meth:`write`.
        """
        block, position = self._blocks[rank], self.layout.position(name, index)
        if value < int(block[position]):
            where = "" if rank == self.rank else f" in the block of rank {rank}"
            raise ProtocolError(f"rank {self.rank}: word {name}[{index}]{where} would fall from {int(block[position])} to {value}")
        block[position] = value

    def block(self, rank: int, name: str) -> npt.NDArray[np.int64]:
        """All words of one name of any rank that is mapped, themselves, not a copy: int64 ``[their number]``."""
        start = self.layout.offsets[name]
        return self._blocks[rank][start : start + self.layout.lengths[name]]

    def put(self, name: str, value: int, index: int = 0, rank: int | None = None) -> None:
        """Store a payload word (a checksum, the bits of a number) in the block of ``rank`` (None: this one): single writer too, but without
        an order of values."""
        self._blocks[self.rank if rank is None else rank][self.layout.position(name, index)] = value
