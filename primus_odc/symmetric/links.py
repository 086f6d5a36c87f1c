"""Liveness between nodes: one TCP connection from every rank to one rank of every other node, its *contact* there.

In a node liveness is shared memory and Unix sockets (:mod:`primus_odc.symmetric.liveness`), which end at the machine. So each rank hears of
another node through its contact (:func:`contacts` deals the ranks out evenly, so a rank is the contact of one rank in every other node
where nodes are equally large). Protocol:

1. Every rank listens at its address (``bootstrap.meet`` tried it). Address, port and a random token travel over the process group, together
   with what the ranks of a host tell each other.
2. Every rank connects to its contacts and sends the contact's token and its own rank; the contact answers with the rank's token. Whoever
   does not know the token is a stranger and is cut off: a port is open to everybody. Then nobody listens any more.
3. Both directions carry lines of JSON. Every ``HEARTBEAT_S``, and at once when a mate ended or this rank fails, the contact tells of all
   ranks of its node: ``{"beats": [[rank, n]..], "aborts": [[rank, text]..], "dead": [rank..], "left": [rank..]}``. In the other direction
   goes nothing but a failure of the rank itself, lest its end be heard before its last words. Either says ``{"goodbye": true}`` before it
   leaves.
4. End-of-file or a reset without goodbye is the death of the process at the other end. Its mates see it too and tell their links, so that
   all ranks of all nodes name it. Any other error (no route, timed out) is a cut network: nothing is heard any more, which is silence.
5. A rank whose heartbeat stands still is silent; where that of the contact stands still as well, the contact is named, for it tells nothing
   of others then. A rank whose contact left is waited for by the clock alone (:mod:`primus_odc.symmetric.pulse` says how long, and why).

Nothing here waits after start-up: what a socket does not take at once stays, and no further report is begun before it is gone.
"""

from __future__ import annotations

import errno
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primus_odc.errors import PeerError, PeerTimeoutError
from primus_odc.symmetric.board import Board

Report = Mapping[str, Any]

_TOKEN_BYTES = 16
_HELLO_BYTES = 2 * _TOKEN_BYTES + 8  # the token in hexadecimal digits, and the rank in eight decimal ones
_ENDED = (errno.ECONNRESET, errno.EPIPE)


def contacts(nodes: Sequence[int], node: int) -> dict[int, int]:
    """Rank of another node -> its contact in ``node``; ``nodes`` is the node of every rank."""
    members = [r for r, n in enumerate(nodes) if n == node]
    elsewhere = [r for _, r in sorted((n, r) for r, n in enumerate(nodes) if n != node)]
    return {rank: members[i % len(members)] for i, rank in enumerate(elsewhere)}


@dataclass(frozen=True)
class Machines:
    """``nodes``: the node of every heap rank; ``address``: of this rank's interface by which the other nodes reach it."""

    nodes: Sequence[int]
    address: str


@dataclass(frozen=True)
class Card:
    """Where a rank listens, and the token that its peers have to know."""

    address: str
    port: int
    token: str


class Link:
    """One connection to ``peer``, which is the contact of this rank (``hears``), or has this rank as its contact."""

    def __init__(self, sock: socket.socket, peer: int, *, hears: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.hears = hears
        self._unsent = b""
        self._unread = b""
        self._cut = False

    def send(self, report: Report) -> None:
        """Begin to send ``report``, unless the one before is still on its way."""
        self._push(b"" if self._unsent else json.dumps(report, separators=(",", ":")).encode() + b"\n")

    def read(self) -> tuple[list[Report], str]:
        """What has come, and how the connection ended: ``closed``, ``cut``, or not (empty)."""
        end = ""
        try:
            while data := self.sock.recv(1 << 16):
                self._unread += data
            end = "closed"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            end = "closed" if error.errno in _ENDED else "cut"
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines], "cut" if end and self._cut else end

    def close(self, *, goodbye: bool) -> None:
        """End the connection."""
        if goodbye:
            self._push(b'{"goodbye":true}\n')
            self.read()  # closing with unread data would be a reset, and what was not sent yet would be dropped
        self.sock.close()

    def _push(self, data: bytes) -> None:
        self._unsent += data
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._cut |= error.errno not in _ENDED  # what ended shows when it is read


@dataclass(frozen=True)
class Links:
    """The links of one rank; ``via``: rank of another node -> the contact through which one hears of it."""

    links: Sequence[Link]
    via: Mapping[int, int]

    def tell(self, board: Board, dead: Iterable[int], left: Iterable[int]) -> None:
        """Send the state of this node's ranks to all whose contact this rank is."""
        near = board.near
        report = {
            "beats": [[r, board.beat_of(r)] for r in near],
            "aborts": [[r, text] for r, text in board.aborted().items() if r in near],
            "dead": [r for r in dead if r in near],
            "left": [r for r in left if r in near],
        }
        last_words = board.abort_message(board.rank)
        for link in self.links:
            if not link.hears:
                link.send(report)
            elif last_words:
                link.send({"beats": [], "aborts": [[board.rank, last_words]], "dead": [], "left": []})

    def hear(self, link: Link, board: Board) -> tuple[list[int], list[int], bool]:
        """Note what came over ``link``; ``(dead, left, whether the link has ended)``."""
        reports, end = link.read()
        dead: list[int] = []
        left: list[int] = []
        for report in reports:
            if "goodbye" in report:
                left.append(link.peer)
            else:
                board.note(dict(report["beats"]), dict(report["aborts"]))
                dead += report["dead"]
                left += report["left"]
        if end == "closed":
            dead.append(link.peer)
        return dead, left, bool(end)


class Door:
    """Where this rank listens for those whose contact it is, from construction to :meth:`connect` or :meth:`close`."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self.card = Card(address, self._server.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    def connect(self, rank: int, names: Sequence[str], nodes: Sequence[int], cards: Sequence[Card], timeout_s: float) -> Links:
        """Make the links of ``rank`` (collective).

        Args:
            names: of all ranks, for messages.
            nodes: the node of every rank.
            cards: of all ranks.
            timeout_s: limit for all of it.

        Raises:
            PeerTimeoutError: some rank did not connect, or did not answer.
            PeerError: a contact cannot be reached or closed the connection.
        """
        deadline = time.monotonic() + timeout_s
        dealt = {node: contacts(nodes, node) for node in sorted(set(nodes))}
        told = {r for r, contact in dealt[nodes[rank]].items() if contact == rank}
        via = {r: dealt[nodes[r]][rank] for r in range(len(nodes)) if nodes[r] != nodes[rank]}
        called: dict[int, socket.socket] = {}
        callers: dict[int, socket.socket] = {}
        try:
            for contact in sorted(set(via.values())):
                called[contact] = self._call(rank, contact, names, cards[contact], deadline)
            self._receive(told, callers, cards, deadline)
            if missing := ", ".join(names[r] for r in sorted(told - set(callers))):
                raise PeerTimeoutError(
                    f"{names[rank]}: links between nodes: {missing} did not connect to {self.card.address} within {timeout_s:g} s "
                    f"(odc.timeout_s): see the output of {missing}; do all nodes reach each other by odc.interface?"
                )
            for contact, sock in called.items():
                self._hear_answer(sock, f"{names[rank]}: links between nodes: {names[contact]} at {cards[contact].address}", deadline)
        except BaseException:
            for sock in [*called.values(), *callers.values()]:
                sock.close()
            raise
        finally:
            self.close()
        hearing = [Link(sock, peer, hears=True) for peer, sock in called.items()]
        return Links([*hearing, *(Link(sock, peer, hears=False) for peer, sock in callers.items())], via)

    def _call(self, rank: int, contact: int, names: Sequence[str], card: Card, deadline: float) -> socket.socket:
        try:
            sock = socket.create_connection((card.address, card.port), max(_left(deadline), 0.01), (self.card.address, 0))
            sock.sendall(f"{card.token}{rank:08}".encode())
        except OSError as error:
            kind = PeerTimeoutError if isinstance(error, TimeoutError) else PeerError
            raise kind(
                f"{names[rank]}: links between nodes: {self.card.address} does not reach {names[contact]} at {card.address} port "
                f"{card.port}: {error}; see the output of {names[contact]}; set odc.interface to one by which all nodes reach each other"
            ) from error
        return sock

    def _receive(self, told: set[int], callers: dict[int, socket.socket], cards: Sequence[Card], deadline: float) -> None:
        """Let those of ``told`` in who come in time and know the token."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            said: dict[socket.socket, bytes] = {}
            try:
                while told - set(callers) and _left(deadline) > 0:
                    for key, _ in selector.select(_left(deadline)):
                        if key.fileobj is self._server:
                            sock, _ = self._server.accept()
                            sock.setblocking(False)
                            said[sock] = b""
                            selector.register(sock, selectors.EVENT_READ)
                            continue
                        sock = key.fileobj  # type: ignore[assignment]  # registered above
                        data = _taken(sock, _HELLO_BYTES - len(said[sock]))
                        said[sock] += data
                        if data and len(said[sock]) < _HELLO_BYTES:
                            continue
                        selector.unregister(sock)
                        rank = self._known(said.pop(sock))
                        if rank in told and rank not in callers and _answered(sock, cards[rank].token):
                            callers[rank] = sock
                        else:
                            sock.close()
            finally:
                for stranger in said:
                    stranger.close()

    def _known(self, hello: bytes) -> int:
        """The rank that says so; -1 for a stranger."""
        token, rank = hello[: 2 * _TOKEN_BYTES], hello[2 * _TOKEN_BYTES :]
        return int(rank) if secrets.compare_digest(token, self.card.token.encode()) and rank.isdigit() else -1

    def _hear_answer(self, sock: socket.socket, what: str, deadline: float) -> None:
        answer = b""
        while len(answer) < 2 * _TOKEN_BYTES:
            sock.settimeout(max(_left(deadline), 0.01))
            try:
                data = sock.recv(2 * _TOKEN_BYTES - len(answer))
            except TimeoutError as error:
                raise PeerTimeoutError(f"{what} did not answer in time (odc.timeout_s)") from error
            except ConnectionError:
                data = b""
            if not data:
                raise PeerError(f"{what} closed the connection: it failed, or is not a rank of this job; see its output")
            answer += data
        if not secrets.compare_digest(answer, self.card.token.encode()):
            raise PeerError(f"{what}: somebody else answers there: this address belongs to several hosts; set odc.interface")


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _answered(sock: socket.socket, token: str) -> bool:
    """Send ``token``; whether the other end is still there. Who has gone is named as one that did not come."""
    try:
        sock.sendall(token.encode())  # the first bytes of a connection: they fit
    except ConnectionError:
        return False
    return True


def _taken(sock: socket.socket, nbytes: int) -> bytes:
    """What can be read now; empty at the end of the connection."""
    try:
        return sock.recv(nbytes)
    except ConnectionError:
        return b""
