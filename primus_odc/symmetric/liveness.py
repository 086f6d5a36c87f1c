"""Who is alive: end-of-file on a socket is a death, a frozen heartbeat is a silence.

Each pair of ranks on a host keeps one stream socket open for as long as the heap lives. The kernel closes it the moment a process
ends, however it ends (exception, ``kill -9``, the out-of-memory killer), so a peer's death is seen at once and by name. A rank that
leaves on purpose says ``GOODBYE`` first. A live process that makes no progress keeps its socket open; its heartbeat word, written by
the watcher thread, tells a busy rank (beats) from a stopped one (does not). What reaches other nodes of it, and comes from there, stands in
:mod:`primus_odc.symmetric.links`; the same thread serves them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterable

from primus_odc.symmetric.board import Board
from primus_odc.symmetric.links import Link, Links

GOODBYE = b"G"
HEARTBEAT_S = 0.1
_TELL_S = 1.0


class PeerWatcher:
    """Watches one socket per peer from a daemon thread and beats this rank's heart.

    Args:
        sockets: ``{rank: connected stream socket}`` of the ranks of this node.
        board: gets a beat every :data:`HEARTBEAT_S` seconds from the watcher thread, and what is heard of other nodes.
        links: to other nodes.
    """

    def __init__(self, sockets: dict[int, socket.socket], board: Board, links: Links | None = None) -> None:
        self._sockets = sockets
        self._board = board
        self._links = links if links is not None else Links((), {})
        self._dead: dict[int, None] = {}  # a set that keeps its order
        self._left: set[int] = set()
        self._asked = self._answered = 0
        self._wake_r, self._wake_w = os.pipe()
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        for rank, sock in sockets.items():
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        for link in self._links.links:
            self._selector.register(link.sock, selectors.EVENT_READ, link)
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

    def contact_of(self, rank: int) -> int:
        """Through whom one hears of ``rank``: of a rank of this node, and of a contact, without anybody between."""
        return self._links.via.get(rank, rank)

    def tell(self) -> None:
        """Have other nodes told at once what the board shows: this process may be about to end. Returns when that was sent, or after
        :data:`_TELL_S`."""
        if not self._links.links or self._stopping.is_set():
            return
        deadline = time.monotonic() + _TELL_S
        self._asked = asked = self._asked + 1
        os.write(self._wake_w, b"t")
        while self._answered < asked and time.monotonic() < deadline:
            time.sleep(0.001)

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # noqa: BLE001  # told to every rank, this one included, which fails in its next call
            if not self._stopping.is_set():
                self._board.abort(f"the thread that watches the other ranks failed: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        due = 0.0
        while not self._stopping.is_set():
            asked, known = self._asked, len(self._dead) + len(self._left)
            if (now := time.monotonic()) >= due or asked > self._answered:
                self._board.beat()
                self._links.tell(self._board, self._dead, self._left)
                self._answered = asked
                due = now + HEARTBEAT_S
            for key, _ in self._selector.select(timeout=max(0.0, due - now)):
                if isinstance(key.data, Link):
                    dead, left, ended = self._links.hear(key.data, self._board)
                    self._end(dead, left)
                    if ended:
                        self._selector.unregister(key.data.sock)
                elif key.data is not None:
                    self._read(key.data)
                elif not self._stopping.is_set():
                    os.read(self._wake_r, 1)
            if len(self._dead) + len(self._left) > known:
                due = 0.0  # other nodes are told at once

    def _read(self, rank: int) -> None:
        sock = self._sockets[rank]
        try:
            data = sock.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        self._end([rank] if data == b"" else [], [rank] if GOODBYE in data else [])
        if data == b"" or rank in self._left:
            self._selector.unregister(sock)

    def _end(self, dead: Iterable[int], left: Iterable[int]) -> None:
        self._left.update(r for r in left if r not in self._dead)
        self._dead |= dict.fromkeys(r for r in dead if r not in self._left)

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
        for link in self._links.links:
            link.close(goodbye=goodbye)
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def close_in_child(self) -> None:
        """Drop the copies of the sockets a forked child inherited; ``stop`` there must not touch the parent's wake-up pipe."""
        self._stopping.set()
        for sock in [*self._sockets.values(), *(link.sock for link in self._links.links)]:
            os.close(sock.detach())


def _close_in_child(reference: weakref.ref[PeerWatcher]) -> None:
    watcher = reference()
    if watcher is not None and not watcher._stopping.is_set():
        watcher.close_in_child()
