"""Runs the effects of :mod:`primus_odc.primitives.protocol` on a heap, and the owner's progress thread."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable

from primus_odc.primitives.lanes import Lanes
from primus_odc.primitives.protocol import Do, Effect, RankProtocol, Wait
from primus_odc.symmetric.heap import SymmetricHeap

PROGRESS_S = 0.001


def run(heap: SymmetricHeap, steps: Iterable[Effect]) -> None:
    """Execute ``steps`` in order; waits block (and may raise, see :meth:`SymmetricHeap.wait`)."""
    for effect in steps:
        if isinstance(effect, Wait):
            heap.wait(effect.rank, effect.word, effect.index, effect.at_least, effect.operation)
        elif isinstance(effect, Do):
            effect.action()
        else:
            heap.store(effect.word, effect.value, effect.index)


class ProgressThread:
    """(owner mode) Adds arrivals and returns credits while the owner computes, so that no source waits for the owner's own progress.

    An error in it aborts the heap: every rank, this one included, then fails in its next wait.
    """

    def __init__(self, heap: SymmetricHeap, protocol: RankProtocol, lanes: Lanes) -> None:
        self._heap = heap
        self._protocol = protocol
        self._lanes = lanes
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._sources = [r for r in protocol.t.peers if r != heap.rank]
        self._thread = threading.Thread(target=self._run, name="primus-odc-progress", daemon=True)
        self._thread.start()
        # A daemon thread that the interpreter stops inside a tensor operation aborts the process ("terminate called"), which would hide
        # the exit code and the traceback of a rank that ends in the middle of a minibatch.
        atexit.register(self.stop)

    def _run(self) -> None:
        try:
            with self._lanes.serving():
                while not self._stopping.wait(PROGRESS_S):
                    for source in self._sources:
                        run(self._heap, self._protocol.serve(self._heap.words.read, source))
        except BaseException as error:  # noqa: BLE001  # handed to the main thread, which raises it
            self._error = error
            self._heap.abort(str(error))

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread; also done when the interpreter exits."""
        atexit.unregister(self.stop)
        self._stopping.set()
        self._thread.join(timeout=self._heap.timeout_s)
