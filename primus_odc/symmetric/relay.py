"""Far words that every rank shows to its mates itself, where these may not look at its memory.

A GPU may promise the order of a network card's writes to itself only. A mate that saw a word there could still read old data behind it.
So a thread of each rank looks at the rank's own far words, has what they cover made visible to the other GPUs of the machine
(:meth:`primus_odc.symmetric.network.Network.make_visible`), and copies the words into host memory. There all ranks of the node read them,
the rank itself included. In this order: what arrives between the look and the making visible is shown by the next turn.

An error in it fails the heap, so that every rank learns of it. The thread ends with :meth:`Relay.stop`, with the interpreter, and when this
object is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from primus_odc.symmetric.network import Network
from primus_odc.symmetric.threads import stop_thread

RELAY_S = 0.0002
"""Between two looks. What waits for a word is a gather or a sum; a look costs this process some 20 us."""


class Relay:
    """Shows the far words of ``rank``.

    Args:
        network: where they lie.
        rank: this rank.
        show: stores a block where the mates read it.
        fail: tells all ranks that this one failed.
        timeout_s: how long :meth:`stop` waits for the thread.
    """

    def __init__(
        self, network: Network, rank: int, show: Callable[[npt.NDArray[np.int64]], None], fail: Callable[[str], None], timeout_s: float
    ) -> None:
        stopping = threading.Event()
        turn = _Turn(network, rank, show)
        thread = threading.Thread(target=_run, args=(turn, fail, stopping), name="primus-odc-relay", daemon=True)
        self._finalizer = weakref.finalize(self, stop_thread, thread, stopping, timeout_s)
        thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._finalizer()


class _Turn:
    def __init__(self, network: Network, rank: int, show: Callable[[npt.NDArray[np.int64]], None]) -> None:
        self._network, self._rank, self._show = network, rank, show
        self._shown: npt.NDArray[np.int64] | None = None

    def __call__(self) -> None:
        words = self._network.far_words(self._rank)
        if self._shown is None or not np.array_equal(words, self._shown):
            self._network.make_visible()
            self._show(words)
            self._shown = words


def _run(turn: _Turn, fail: Callable[[str], None], stopping: threading.Event) -> None:
    while not stopping.wait(RELAY_S):
        try:
            turn()
        except BaseException as error:  # noqa: BLE001  # told to every rank, this one included, which fails in its next call
            fail(f"showing far words to the ranks of this node: {error}")
            return
