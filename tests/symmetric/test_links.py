"""Links between nodes: who is connected with whom, strangers at the door, and what is heard when a connection ends."""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from primus_odc.errors import PeerError, PeerTimeoutError
from primus_odc.primitives.nodes import Nodes
from primus_odc.symmetric import links as module
from primus_odc.symmetric.board import OWN_WORDS, Board
from primus_odc.symmetric.links import Card, Door, Link, Links, contacts
from primus_odc.symmetric.words import WordLayout
from tests.symmetric.harness import all_good, in_threads

NODES = (0, 1, 1, 0, 1)
NAMES = [f"rank {r}" for r in range(len(NODES))]
Exchange = Callable[[Any], list[Any]]


def test_contacts_are_those_who_tell_of_their_node_in_the_protocol() -> None:
    chance = random.Random(0)
    for _ in range(50):
        count = chance.randint(2, 5)
        nodes = [*range(count), *(chance.randrange(count) for _ in range(chance.randint(0, 12)))]
        chance.shuffle(nodes)
        members = tuple(tuple(r for r, n in enumerate(nodes) if n == node) for node in range(count))
        protocol = Nodes(members, len(nodes))
        for node in range(count):
            assert contacts(nodes, node) == {r: protocol.contact(node, r) for r in range(len(nodes)) if nodes[r] != node}


def _connect(rank: int, exchange: Exchange, disturb: Callable[[Card], Any] = lambda card: None) -> Links:
    door = Door("127.0.0.1")
    kept = disturb(door.card)  # before anybody else knows of it
    links = door.connect(rank, NAMES, NODES, exchange(door.card), 10.0)
    del kept
    return links


def test_every_rank_hears_of_every_other_node_through_its_contact() -> None:
    found = all_good(in_threads(len(NODES), _connect))
    for rank, links in enumerate(found):
        assert links.via == {r: contacts(NODES, NODES[r])[rank] for r in range(len(NODES)) if NODES[r] != NODES[rank]}
        assert {link.peer for link in links.links if link.hears} == set(links.via.values())
        told = {link.peer for link in links.links if not link.hears}
        assert told == {r for r, contact in contacts(NODES, NODES[rank]).items() if contact == rank}
        for link in links.links:
            link.close(goodbye=False)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, b"0" * 32 + b"00000001", b"short"])
def test_strangers_are_let_in_nowhere_and_hold_up_nobody(words: bytes) -> None:
    def disturb(card: Card) -> list[socket.socket]:
        strangers = [socket.create_connection((card.address, card.port)) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(words)
        return strangers

    found = all_good(in_threads(len(NODES), lambda rank, exchange: _connect(rank, exchange, disturb)))
    assert [link.read() for links in found for link in links.links] == [([], "")] * 10
    for links in found:
        for link in links.links:
            link.close(goodbye=False)


def test_a_rank_that_does_not_come_is_named() -> None:
    def come(rank: int, exchange: Exchange) -> Links | None:
        door = Door("127.0.0.1")
        cards = exchange(door.card)
        if rank == 1:
            time.sleep(1.5)
            door.close()
            return None
        return door.connect(rank, NAMES, NODES, cards, 1.0)

    results = in_threads(len(NODES), come)
    told = contacts(NODES, 0)[1]
    asks = [r for r, contact in contacts(NODES, 1).items() if contact == 1]
    assert isinstance(results[told], PeerTimeoutError)
    assert "rank 1 did not connect to 127.0.0.1 within 1 s" in str(results[told]) and "odc.interface" in str(results[told])
    assert asks
    for rank in set(asks) - {told}:
        assert isinstance(results[rank], PeerTimeoutError) and "rank 1 at 127.0.0.1 did not answer in time" in str(results[rank])


def test_a_rank_that_ends_while_it_is_answered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door("127.0.0.1")
    caller = socket.create_connection((door.card.address, door.card.port))
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset, as when a process is killed
    caller.sendall(f"{door.card.token}{1:08}".encode())
    taken = module._taken

    def taken_last(sock: socket.socket, nbytes: int) -> bytes:
        data = taken(sock, nbytes)
        caller.close()
        gone = select.poll()
        gone.register(sock, 0)  # a reset is told all the same
        assert gone.poll(5000)
        return data

    monkeypatch.setattr(module, "_taken", taken_last)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cards = [door.card, Card("127.0.0.1", silent.getsockname()[1], "f" * 32)]
        with pytest.raises(PeerTimeoutError, match="rank 0: links between nodes: rank 1 did not connect"):
            door.connect(0, ["rank 0", "rank 1"], [0, 1], cards, 0.5)


def test_a_contact_that_cannot_be_reached_is_named() -> None:
    def come(rank: int, exchange: Exchange) -> Links:
        door = Door("127.0.0.1")
        cards = exchange(door.card)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        cards = [Card(c.address, port, c.token) if r == 1 else c for r, c in enumerate(cards)]
        return door.connect(rank, NAMES, NODES, cards, 1.0)

    results = in_threads(len(NODES), come)
    for rank in (r for r, contact in contacts(NODES, 1).items() if contact == 1):
        assert isinstance(results[rank], PeerError)
        assert "127.0.0.1 does not reach rank 1 at 127.0.0.1 port" in str(results[rank]) and "Connection refused" in str(results[rank])


def test_a_token_that_differs_on_either_side_is_refused() -> None:
    """The others think that ranks 1 and 4 have other tokens: rank 0 asks rank 1 with a wrong one, and answers rank 4 with a wrong one."""

    def come(rank: int, exchange: Exchange) -> Links:
        door = Door("127.0.0.1")
        cards = [Card(c.address, c.port, "f" * 32) if r in (1, 4) else c for r, c in enumerate(exchange(door.card))]
        return door.connect(rank, NAMES, NODES, cards, 1.0)

    results = in_threads(len(NODES), come)
    assert [type(result).__name__ for result in results] == ["PeerError", "PeerTimeoutError", "Links", "Links", "PeerError"]
    assert "rank 1 at 127.0.0.1 closed the connection: it failed, or is not a rank of this job" in str(results[0])
    assert "rank 0 did not connect" in str(results[1])
    assert "rank 0 at 127.0.0.1: somebody else answers there" in str(results[4])


def _pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Link(near, 1, hears=True), Link(far, 0, hears=False)


def _board(rank: int, far: int) -> Board:
    layout = WordLayout.of(OWN_WORDS)
    return Board(layout, {rank: torch.from_numpy(np.zeros(Board.nbytes(layout), np.uint8))}, rank, [far])


def _hear(links: Links, link: Link, board: Board, until: Callable[[], bool]) -> tuple[list[int], list[int], bool]:
    """What is heard until something is, or until ``until()``."""
    deadline = time.monotonic() + 5
    while (heard := links.hear(link, board)) == ([], [], False) and not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return heard


def _never() -> bool:
    return False


def test_beats_aborts_deaths_and_goodbyes_are_told() -> None:
    hears, tells = _pair()
    mine, theirs = Links([hears], {1: 1}), Links([tells], {0: 0})
    board, their_board = _board(0, 1), _board(1, 0)
    for _ in range(3):
        their_board.beat()
    theirs.tell(their_board, (), ())
    assert _hear(mine, hears, board, lambda: board.beat_of(1) == 3) == ([], [], False)
    assert board.aborted() == {}
    their_board.abort("µ" * 2000)
    theirs.tell(their_board, [1, 0], [])  # of its own node only
    assert _hear(mine, hears, board, _never) == ([1], [], False)
    assert set(board.aborted()) == {1} and board.aborted()[1].startswith("µ" * 500)
    tells.close(goodbye=True)
    assert _hear(mine, hears, board, _never)[1] == [1]
    hears.close(goodbye=False)


def test_who_is_nobodys_contact_has_its_last_words_heard_before_its_end() -> None:
    """Rank 0 hears over this link, and says nothing on it but why it failed."""
    hears, tells = _pair()
    mine, theirs, board, their_board = Links([hears], {1: 1}), Links([tells], {0: 0}), _board(0, 1), _board(1, 0)
    mine.tell(board, (), ())
    board.abort("out of memory")
    mine.tell(board, (), ())
    hears.close(goodbye=False)
    assert _hear(theirs, tells, their_board, _never)[0] == [0]
    assert their_board.aborted() == {0: "out of memory"}
    tells.close(goodbye=False)


def test_an_end_without_goodbye_is_a_death() -> None:
    for goodbye in (False, True):
        hears, tells = _pair()
        links, board = Links([hears], {1: 1}), _board(0, 1)
        tells.close(goodbye=goodbye)
        deadline = time.monotonic() + 5
        found: list[int] = []
        while not (heard := links.hear(hears, board))[2]:
            assert time.monotonic() < deadline
            found += heard[1]
        # With a goodbye both are heard; who left before is not taken for dead (PeerWatcher).
        assert (heard[0], found + heard[1]) == ([1], [1] if goodbye else [])
        hears.close(goodbye=False)


class _BrokenSocket:
    """A connection over which nothing goes any more."""

    def __init__(self, receive: OSError | None, send: OSError | None) -> None:
        self._receive, self._send = receive, send

    def setblocking(self, _: bool) -> None: ...
    def setsockopt(self, *_: int) -> None: ...

    def recv(self, _: int) -> bytes:
        if self._receive is not None:
            raise self._receive
        return b""

    def send(self, data: bytes) -> int:
        if self._send is not None:
            raise self._send
        return len(data)


@pytest.mark.parametrize(
    ("receive", "send", "dead"),
    [
        (OSError(errno.EHOSTUNREACH, "no route"), None, False),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), None, False),
        (None, OSError(errno.ENETUNREACH, "no network"), False),  # told to the sender; the reader sees an end
        (ConnectionResetError(errno.ECONNRESET, "reset"), None, True),
        (None, BrokenPipeError(errno.EPIPE, "broken pipe"), True),
    ],
)
def test_a_cut_network_is_no_death(receive: OSError | None, send: OSError | None, dead: bool) -> None:
    link = Link(cast(socket.socket, _BrokenSocket(receive, send)), 1, hears=False)
    links, board = Links([link], {1: 1}), _board(0, 1)
    links.tell(board, (), ())
    assert links.hear(link, board) == ([1] if dead else [], [], True)


def test_a_peer_that_does_not_read_holds_up_nobody_and_gets_whole_reports_later() -> None:
    hears, tells = _pair()
    mine, theirs, board, their_board = Links([hears], {1: 1}), Links([tells], {0: 0}), _board(0, 1), _board(1, 0)
    their_board.abort("x" * 1000)
    for _ in range(20_000):  # 20 MB: more than sockets hold
        their_board.beat()
        theirs.tell(their_board, (), ())
    assert 0 < len(tells._unsent) < 2000, "one report at most is kept"
    _hear(mine, hears, board, lambda: board.beat_of(1) > 0)
    before = board.beat_of(1)
    assert 0 < before < 20_000

    def arrives() -> bool:
        theirs.tell(their_board, (), ())
        return board.beat_of(1) == 20_000

    _hear(mine, hears, board, arrives)
    for link in (hears, tells):
        link.close(goodbye=False)
