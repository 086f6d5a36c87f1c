"""Words that ranks of other nodes store: they lie where the network can write, and the host looks at a copy of them.

Looking costs a small kernel or a copy, so a block is fetched whole, no more often than every :data:`LOOK_S` where a word is waited for, and
a wait that the last copy satisfies fetches nothing: words only grow. A payload word (a number beside a word that says it is there) has no
order of values and is read afresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from primus_odc.errors import ProtocolError
from primus_odc.symmetric.network import Network
from primus_odc.symmetric.words import WordLayout

LOOK_S = 50e-6


class FarWords:
    """The far words of the ranks of this node, as last looked at, and those this rank stores in other nodes. For one thread.

    Args:
        layout: of every rank's block.
        network: takes those for other nodes.
        look: a copy of a rank's block as it is now.
        me: how this rank is called in messages.
    """

    def __init__(self, layout: WordLayout, network: Network, look: Callable[[int], npt.NDArray[np.int64]], me: str) -> None:
        self.layout = layout
        self._block_of = look
        self._network = network
        self._me = me
        self._seen: dict[int, npt.NDArray[np.int64]] = {}
        self._looked_at: dict[int, float] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def read(self, home: int, name: str, index: int, *, afresh: bool = False) -> int:
        """``name[index]`` of ``home``, a rank of this node, as of the last look at it, or as it is now."""
        if afresh or home not in self._seen:
            self._look(home)
        return int(self._seen[home][self.layout.position(name, index)])

    def reached(self, home: int, name: str, index: int, at_least: int, *, afresh: bool = False) -> bool:
        """Whether the word is ``at_least`` that; looks again if it was not, and (``afresh``: even if) some time has passed."""
        if home in self._seen and self.read(home, name, index) >= at_least:
            return True
        due = self._looked_at.get(home, 0.0) + LOOK_S
        return (afresh or time.monotonic() >= due) and self.read(home, name, index, afresh=True) >= at_least

    def signal(self, rank: int, name: str, value: int, index: int) -> None:
        """Store ``name[index]`` of ``rank``, in another node, behind what this rank has put there; this rank is its only writer.

        Raises:
            ProtocolError: the word would decrease.
        """
        key = rank, self.layout.position(name, index)
        if value < self._sent.get(key, 0):
            raise ProtocolError(f"{self._me}: word {name}[{index}] of heap rank {rank} would fall from {self._sent[key]} to {value}")
        self._sent[key] = value
        self._network.signal(rank, key[1], value)

    def put(self, rank: int, name: str, value: int, index: int) -> None:
        """Store a payload word of ``rank``, before what :meth:`signal` stores there afterwards."""
        self._network.signal(rank, self.layout.position(name, index), value)

    def _look(self, home: int) -> None:
        self._seen[home] = self._block_of(home)
        self._looked_at[home] = time.monotonic()
