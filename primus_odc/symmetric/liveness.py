"""Who is alive: end-of-file on a socket is a death, a frozen heartbeat is a silence.

Each pair of ranks on a host keeps one stream socket open for as long as the heap lives. The kernel closes it the moment a process
ends, however it ends (exception, ``kill -9``, the out-of-memory killer), so a peer's death is seen at once and by name. A rank that
leaves on purpose says ``GOODBYE`` first. A live process that makes no progress keeps its socket open; its heartbeat word, written by
the watcher thread, tells a busy rank (beats) from a stopped one (does not).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable

GOODBYE = b"G"
HEARTBEAT_S = 0.1


class PeerWatcher:
    """Watches one socket per peer from a daemon thread and beats this rank's heart.

    Args:
        sockets: ``{rank: connected stream socket}``.
        beat: called every :data:`HEARTBEAT_S` seconds from the watcher thread.
    """

    def __init__(self, sockets: dict[int, socket.socket], beat: Callable[[], None]) -> None:
        self._sockets = sockets
        self._beat = beat
        self._dead: dict[int, None] = {}  # a set that keeps its order
        self._left: set[int] = set()
        self._wake_r, self._wake_w = os.pipe()
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        for rank, sock in sockets.items():
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="primus-odc-watcher", daemon=True)
        self._thread.start()
        # A forked child (a data loader worker) would hold a copy of every socket and so hide this process's death from its peers.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(reference))

    @property
    def dead(self) -> tuple[int, ...]:
        """Peers whose process ended without a goodbye, in the order in which that was noticed: the first is the likeliest cause."""
        return tuple(self._dead)

    @property
    def left(self) -> frozenset[int]:
        """Peers that said goodbye."""
        return frozenset(self._left)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._beat()
            for key, _ in self._selector.select(timeout=HEARTBEAT_S):
                if key.data is not None:
                    self._read(key.data)

    def _read(self, rank: int) -> None:
        sock = self._sockets[rank]
        try:
            data = sock.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if GOODBYE in data:
            self._left.add(rank)
        elif data == b"" and rank not in self._left:
            self._dead[rank] = None
        if data == b"" or rank in self._left:
            self._selector.unregister(sock)

    def stop(self, *, goodbye: bool) -> None:
        """End the thread and close the sockets; with ``goodbye`` peers learn that this rank left on purpose."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.write(self._wake_w, b"x")
        if threading.current_thread() is not self._thread:  # the garbage collector may run, and end a dropped heap, in any thread
            self._thread.join(timeout=30)
        for sock in self._sockets.values():
            if goodbye:
                # A peer that is gone already makes the send fail: there is nobody left to say goodbye to.
                with contextlib.suppress(BrokenPipeError, ConnectionError, BlockingIOError):
                    sock.send(GOODBYE)
            sock.close()
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def close_in_child(self) -> None:
        """Drop the copies of the sockets a forked child inherited; ``stop`` there must not touch the parent's wake-up pipe."""
        self._stopping.set()
        for sock in self._sockets.values():
            os.close(sock.detach())


def _close_in_child(reference: weakref.ref[PeerWatcher]) -> None:
    watcher = reference()
    if watcher is not None and not watcher._stopping.is_set():
        watcher.close_in_child()
