"""What a heap needs of the memory of ranks in other nodes: it is written, never read."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Network(Protocol):
    """One-sided writes into other nodes, in the order of the current stream (:class:`primus_odc.symmetric.shmem.network.ShmemNetwork`).

    Each rank has, besides its arena, a block of *far words* that ranks of other nodes store: 64-bit, at the end of its arena, read by the
    ranks of its own node.

    Attributes:
        mates_look: whether ranks of one node may look at each other's far words, and then read what these cover; else every rank looks at
            its own only, and shows them (:mod:`primus_odc.symmetric.relay`).
    """

    mates_look: bool

    def put(self, rank: int, offset: int, source: torch.Tensor) -> None:
        """Write ``source`` (uint8 ``[n]``, contiguous, part of this rank's own arena) from byte ``offset`` of the arena of ``rank`` on.

        It leaves with the next :meth:`signal` to that rank, and is visible there before what that one stores.
        """

    def signal(self, rank: int, position: int, value: int) -> None:
        """Far word ``position`` of ``rank`` becomes ``value`` (any 64 bits), behind all that this rank has put and signalled there.

        It leaves with the next :meth:`submit` at the latest; what goes to several ranks until then need not be in any order.
        """

    def submit(self) -> None:
        """Give what was signalled to the current stream, in as few launches as its order allows."""

    def far_words(self, home: int) -> npt.NDArray[np.int64]:
        """The far words of ``home``, this rank or one of its node, as stored by now: int64 ``[number of far words]``."""

    def make_visible(self) -> None:
        """What the far words of this rank cover, as looked at last, is seen by the other ranks of the node from now on."""
