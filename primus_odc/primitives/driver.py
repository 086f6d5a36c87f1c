"""Runs the effects of :mod:`primus_odc.primitives.protocol` on a heap, and the owner's progress thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from primus_odc.errors import PeerTimeoutError
from primus_odc.primitives.contribution import Contribution, split_pieces
from primus_odc.primitives.effects import Do, Effect, Send, Wait
from primus_odc.primitives.lanes import Lanes
from primus_odc.primitives.plane import ArenaPlane
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.symmetric.heap import SymmetricHeap
from primus_odc.symmetric.threads import stop_thread

PROGRESS_S = 0.001
PROGRESS_DEVICE_S = 0.0002
"""Where the arena is on a device: a whole layer can be pushed within a millisecond, and would find the slots of the one before taken."""
EAGER_S = 0.00005
"""While this rank settles on a device: what arrives last is on everybody's critical path, and the host has nothing else to do."""


def run(heap: SymmetricHeap, steps: Iterable[Effect]) -> None:
    """Execute ``steps`` in order; waits block (and may raise, see :meth:`SymmetricHeap.wait`)."""
    sends: list[Send] = []
    for effect in steps:
        if isinstance(effect, Send):
            sends.append(effect)
            continue
        if sends:
            _send(heap, sends)
        if isinstance(effect, Wait):
            in_vain = None if effect.in_vain is None else partial(effect.in_vain, heap.read)
            heap.wait(effect.rank, effect.word, effect.index, effect.at_least, effect.operation, effect.home, in_vain)
        elif isinstance(effect, Do):
            effect.action()
        else:
            heap.store(effect.word, effect.value, effect.index)
    if sends:
        _send(heap, sends)


def _send(heap: SymmetricHeap, sends: list[Send]) -> None:
    """Those that follow each other leave together: a launch can serve many nodes."""
    with heap.sending():
        for send in sends:
            if send.put is not None:
                send.put()
            heap.signal(send.rank, send.word, send.value, send.index)
    sends.clear()


def push(heap: SymmetricHeap, protocol: RankProtocol, plane: ArenaPlane, group: int, contribution: Contribution) -> None:
    """(owner mode) Hand one reduction's gradients to the owners, each owner's on a stream of its own; waits for nobody."""
    limit = plane.max_piece_numel(contribution.rows.dtype)
    with plane.lanes.pushing():
        for row, owner in enumerate(protocol.t.peers):
            pieces = [(owner, piece) for piece in split_pieces(plane.groups[group], contribution, row, limit)]
            with nullcontext() if owner == heap.rank else plane.lanes.push_to(owner):
                run(heap, protocol.reduce_owner(group, pieces, heap.read))


def push_kept(heap: SymmetricHeap, protocol: RankProtocol, plane: ArenaPlane) -> None:
    """(owner mode) Push what found no slot before; waits for slots."""
    if protocol.pushes.keeps():
        with plane.lanes.pushing():
            for owner in protocol.pushes.owners:
                with plane.lanes.push_to(owner):
                    run(heap, protocol.pushes.push_kept(owner, protocol.epoch, heap.read, wait=True))


def deliver_complete(heap: SymmetricHeap, protocol: RankProtocol, plane: ArenaPlane) -> None:
    """(owner mode) Deliver what is complete already, beside the backward pass that calls this; waits for nobody."""
    with plane.lanes.on(plane.lanes.settle, after_current=False):
        run(heap, protocol.deliver_complete(heap.read))


class ProgressThread:
    """(owner mode) Adds arrivals and returns credits while the owner computes, so that no source waits for the owner's own progress.

    An error in it aborts the heap: every rank, this one included, then fails in its next wait. The thread ends with :meth:`stop`, with the
    interpreter, and when this object is dropped, which it does not keep alive.
    """

    def __init__(self, heap: SymmetricHeap, protocol: RankProtocol, lanes: Lanes) -> None:
        self._heap = heap
        self._protocol = protocol
        self._error: BaseException | None = None
        self._usual_s = self.interval_s = PROGRESS_S if heap.device.type == "cpu" else PROGRESS_DEVICE_S
        self._sources = [r for r in protocol.t.peers if r != heap.rank]
        stopping = threading.Event()
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), lanes, stopping), name="primus-odc-progress", daemon=True)
        # Also at exit: a daemon thread that the interpreter stops inside a tensor operation aborts the process ("terminate called"), which
        # would hide the exit code and the traceback of a rank that ends in the middle of a minibatch.
        self._finalizer = weakref.finalize(self, stop_thread, self._thread, stopping, heap.timeout_s)
        self._thread.start()

    def serve(self) -> None:
        """Add everything that has arrived."""
        try:
            for source in self._sources:
                run(self._heap, self._protocol.serve(self._heap.read, source))
        except BaseException as error:
            self._error = error  # handed to the main thread, which raises it
            self._heap.abort(str(error))
            raise

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Look for arrivals more often, where the arena is on a device."""
        if self._heap.device.type != "cpu":
            self.interval_s = EAGER_S
        try:
            yield
        finally:
            self.interval_s = self._usual_s

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread.

        Raises:
            PeerTimeoutError: it did not end in ``odc.timeout_s``.
        """
        self._finalizer()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            me, limit_s = self._heap.names[self._heap.rank], self._heap.timeout_s
            raise PeerTimeoutError(
                f"{me}: the thread that adds arrivals did not end in {limit_s:g} s; raise odc.timeout_s if it may take that long"
            )


def _serve(reference: weakref.ref[ProgressThread], lanes: Lanes, stopping: threading.Event) -> None:
    with lanes.serving():
        interval_s = PROGRESS_S
        while not stopping.wait(interval_s):
            progress = reference()
            if progress is None:
                return
            interval_s = progress.interval_s
            try:
                progress.serve()
            except BaseException:  # noqa: BLE001  # kept and told by ProgressThread.serve
                return
            del progress  # or the last reference might be this thread's
