"""A heap over two machines (network namespaces joined by a cable) with real processes: what is written across, and who is blamed for what.

Nodes of two and two (2x2), or of two and one (2+1). The memory of the other machine is a stand-in (:mod:`tests.symmetric.far_memory`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from primus_odc.errors import PeerError, PeerTimeoutError, ProtocolError
from primus_odc.symmetric.heap import SymmetricHeap
from tests.symmetric.hosts import ip
from tests.symmetric.machine_ranks import LONG_S, OPERATION, TWO_AND_ONE, TWO_BY_TWO, Start, hosts, send, start

__all__ = ["hosts", "start"]


def _receive(heap: SymmetricHeap, writer: int, epoch: int, home: int) -> tuple[int, int, int]:
    heap.wait(writer, "came", writer, epoch, OPERATION, home=home)
    data = heap.view(home, heap.plan.regions["data"])[1024 + 512 * writer :][:512]
    return int(data.min()), int(data.max()), heap.read(home, "number", epoch % 2, afresh=True)


def test_what_is_put_is_there_when_its_word_is(start: Start) -> None:
    machine = start(TWO_BY_TWO)
    for epoch in range(1, 12):
        assert machine.ask([0, 1], send, 2, epoch) == ["sent"] * 2
        assert machine.ask([2, 3], _receive, 0, epoch, 2) == [(epoch, epoch, -epoch)] * 2, "a mate reads the far words too"
        assert machine.ask([2, 3], _receive, 1, epoch, 2) == [(epoch, epoch, -epoch)] * 2


def _misuse(heap: SymmetricHeap) -> list[str]:
    data, found = heap.plan.regions["data"], []
    for call in (
        lambda: heap.view(2, data),
        lambda: heap.read(2, "step"),
        lambda: heap.wait(2, "step", 0, 1, OPERATION),
        lambda: heap.put(2, data, torch.zeros(8, dtype=torch.uint8)),
        lambda: [heap.signal(2, "came", value, 0) for value in (2, 1)],  # type: ignore[func-returns-value]
    ):
        try:
            call()
        except (ProtocolError, ValueError) as error:
            found.append(str(error))
    return found


def test_what_cannot_reach_another_machine_is_refused(start: Start) -> None:
    (found,) = start(TWO_AND_ONE).ask([0], _misuse)
    assert found == [
        "rank 0: its arena in the memory of rank 2, on another machine, cannot be read",
        "rank 0: step[0] in the memory of rank 2, on another machine, cannot be read",
        "rank 0: step[0] in the memory of rank 2, on another machine, cannot be read",
        "8 bytes for rank 2: what another machine gets has to lie in this rank's own arena",
        "rank 0: word came[0] of heap rank 2 would fall from 2 to 1",
    ]


def _satisfied_waits(heap: SymmetricHeap) -> int:
    heap.wait(0, "came", 0, 5, OPERATION, home=heap.rank)
    before = heap._network.looks  # type: ignore[union-attr]
    for value in range(1, 6):
        heap.wait(0, "came", 0, value, OPERATION, home=heap.rank)
    return heap._network.looks - before  # type: ignore[union-attr]


def test_a_wait_that_was_satisfied_before_fetches_nothing(start: Start) -> None:
    machine = start(TWO_AND_ONE)
    machine.ask([0], send, 2, 5)
    assert machine.ask([2], _satisfied_waits) == [0]


def test_the_pattern_test_finds_a_wrong_route(start: Start) -> None:
    """Rank 0 writes into rank 3 what is for rank 2, and the other way round."""
    found = start(TWO_BY_TWO, misrouted={0: {2: 3, 3: 2}}).ranks.hear()
    assert all(kind in ("OdcError", "PeerError") for kind, _ in found)
    assert all("start-up pattern test with rank 0 failed: put 0x" in text and "mapped wrongly" in text for _, text in found)


def _wait_for_rank(heap: SymmetricHeap, rank: int) -> str:
    word, home = ("step", rank) if rank in heap.near else ("came", heap.rank)
    heap.wait(rank, word, rank if word == "came" else 0, 10**6, OPERATION, home=home)
    return "arrived"


def _wait_for_all(heap: SymmetricHeap) -> str:
    heap.wait_for(lambda: False, "report of all ranks")
    return "done"


VICTIMS = [(TWO_BY_TWO, 2), (TWO_BY_TWO, 3), (TWO_AND_ONE, 0), (TWO_AND_ONE, 1), (TWO_AND_ONE, 2)]
"""For somebody each is a mate, a contact, a rank of which others tell, and the only rank of its node."""


@pytest.mark.parametrize(("nodes", "victim"), VICTIMS)
def test_a_killed_rank_is_named_by_all_at_once(start: Start, nodes: Sequence[int], victim: int) -> None:
    machine = start(nodes)
    others = machine.others(victim)
    for rank in others:
        machine.tell([rank], _wait_for_rank, others[(others.index(rank) + 1) % len(others)])  # not even for the victim
    machine.ranks.kill(victim)
    for rank, (kind, text) in zip(others, machine.ranks.hear(*others), strict=True):
        assert kind == PeerError.__name__
        assert text.startswith(f"rank {rank}: {OPERATION}: ")
        assert text.endswith(f"rank {victim} died (its process ended without a goodbye)"), text


@pytest.mark.parametrize(("nodes", "victim"), VICTIMS)
def test_a_stopped_rank_is_timed_out_and_named_by_all(start: Start, nodes: Sequence[int], victim: int) -> None:
    machine = start(nodes, timeout_s=1.0)
    others = machine.others(victim)
    os.kill(machine.ranks.pid(victim), signal.SIGSTOP)
    for rank, (kind, text) in zip(others, machine.ask(others, _wait_for_rank, victim), strict=True):
        assert kind == PeerTimeoutError.__name__
        assert text.startswith(f"rank {rank}: {OPERATION}: waiting for "), text
        assert f"no sign of life from rank {victim} for " in text and text.endswith("(odc.timeout_s = 1)"), text


def test_a_stopped_contact_does_not_make_others_be_blamed(start: Start) -> None:
    machine = start(TWO_BY_TWO, timeout_s=2.0)
    os.kill(machine.ranks.pid(2), signal.SIGSTOP)
    machine.tell([0], _wait_for_rank, 3)
    machine.tell([1, 3], _wait_for_all)
    first, *rest = machine.ranks.hear(0, 1, 3)
    assert "no sign of life from rank 2, through which one hears of rank 3, for " in first[1]
    assert all("no sign of life from rank 2 for " in text for _, text in rest), rest


def test_a_busy_rank_of_another_node_is_given_up_at_the_hard_cap_only(start: Start) -> None:
    ((kind, text),) = start(TWO_AND_ONE, timeout_s=1.0).ask([0], _wait_for_rank, 2)
    assert kind == PeerTimeoutError.__name__
    assert "waiting for came[2] of rank 2 to reach 1000000 (it is 0): that rank is alive but did not get there in " in text


def _abort(heap: SymmetricHeap, text: str) -> str:
    heap.abort(text)
    return "aborted"


def _abort_and_die(heap: SymmetricHeap, text: str) -> None:
    heap.abort(text)
    os._exit(1)


@pytest.mark.parametrize(("nodes", "victim"), VICTIMS)
def test_an_abort_reaches_every_rank_with_its_text(start: Start, nodes: Sequence[int], victim: int) -> None:
    machine = start(nodes)
    others = machine.others(victim)
    machine.tell(others, _wait_for_all)
    assert machine.ask([victim], _abort, "gradient of group layers.3 ist unmöglich") == ["aborted"]
    for rank, found in zip(others, machine.ranks.hear(*others), strict=True):
        assert found == (
            PeerError.__name__,
            f"rank {rank}: report of all ranks: rank {victim} aborted: gradient of group layers.3 ist unmöglich",
        )


@pytest.mark.parametrize(("nodes", "victim"), VICTIMS)
def test_last_words_of_a_rank_that_aborts_and_dies_are_told(start: Start, nodes: Sequence[int], victim: int) -> None:
    machine = start(nodes)
    others = machine.others(victim)
    machine.tell(others, _wait_for_all)
    machine.tell([victim], _abort_and_die, "out of memory")
    for _, text in machine.ranks.hear(*others):
        assert text.endswith((f"rank {victim} died after: out of memory", f"rank {victim} aborted: out of memory")), text


def test_a_cut_network_ends_every_rank(start: Start, hosts: list[str]) -> None:
    machine = start(TWO_BY_TWO, timeout_s=2.0)
    machine.tell(range(4), _wait_for_all)
    ip("-n", hosts[0], "link", "set", "cable0", "down")
    try:
        for rank, (kind, text) in enumerate(machine.ranks.hear()):
            elsewhere = [f"no sign of life from rank {r} for " for r in range(4) if machine.nodes[r] != machine.nodes[rank]]
            assert kind == PeerTimeoutError.__name__
            assert any(words in text for words in elsewhere) or "through which one hears of" in text, text
    finally:
        ip("-n", hosts[0], "link", "set", "cable0", "up")


def test_a_network_that_is_back_in_time_does_no_harm(start: Start, hosts: list[str]) -> None:
    machine = start(TWO_AND_ONE, timeout_s=20.0)
    machine.tell([0, 1], _receive, 2, 3, 0)
    ip("-n", hosts[0], "link", "set", "cable0", "down")
    time.sleep(0.5)
    ip("-n", hosts[0], "link", "set", "cable0", "up")
    machine.ask([2], send, 0, 3)
    assert machine.ranks.hear(0, 1) == [(3, 3, -3)] * 2
    machine.ask([2], _abort, "over")
    assert all("rank 2 aborted: over" in text for _, text in machine.ask([0, 1], _wait_for_all)), "links live on"


def _leave(heap: SymmetricHeap, words: Sequence[int] = ()) -> str:
    for rank in words:
        heap.signal(rank, "came", 10**6, heap.rank)
    heap.close()
    return "left"


def test_leaving_is_not_dying(start: Start) -> None:
    machine = start(TWO_BY_TWO)
    others = machine.others(3)
    machine.tell(others, _wait_for_rank, 3)
    assert machine.ask([3], _leave) == ["left"]
    for kind, text in machine.ranks.hear(*others):
        assert kind == PeerError.__name__
        assert text.endswith("to reach 1000000: rank 3 left (detached or closed its heap) and will never get there"), text


def test_what_a_rank_sent_before_it_left_is_there(start: Start) -> None:
    machine = start(TWO_BY_TWO)
    machine.tell([0, 1], _wait_for_rank, 2)
    machine.ask([2], _leave, [0, 1])
    assert machine.ranks.hear(0, 1) == ["arrived"] * 2


def _leave_before_the_word(heap: SymmetricHeap, reader: int) -> str:
    heap._watcher.stop(goodbye=True)
    time.sleep(0.4)
    heap.signal(reader, "came", 10**6, heap.rank)
    return "left"


def test_a_word_that_comes_behind_the_goodbye_counts(start: Start) -> None:
    machine = start(TWO_AND_ONE)
    machine.tell([0], _wait_for_rank, 2)
    machine.ask([2], _leave_before_the_word, 0)
    assert machine.ranks.hear(0) == ["arrived"]


def test_nobody_is_blamed_because_their_contact_left(start: Start) -> None:
    machine = start(TWO_BY_TWO, timeout_s=2.0)
    machine.tell([0], _wait_for_rank, 3)
    machine.ask([2], _leave)
    time.sleep(3.0)
    machine.ask([3], _leave, [0])
    assert machine.ranks.hear(0) == ["arrived"]


LONELY = (0, 1, 1)
"""Rank 1 is the contact of rank 0, which has no mate that would hear of rank 2."""


@pytest.mark.parametrize("waits", [_wait_for_rank, _wait_for_all])
def test_a_silence_behind_a_contact_that_left_is_told_with_the_contact(start: Start, waits: Callable[..., str]) -> None:
    machine = start(LONELY, timeout_s=1.0)
    machine.ask([1], _leave)
    os.kill(machine.ranks.pid(2), signal.SIGSTOP)
    began = time.monotonic()
    ((kind, text),) = machine.ask([0], waits, *([2] if waits is _wait_for_rank else []))
    assert kind == PeerTimeoutError.__name__ and time.monotonic() - began > 3.0
    assert "nothing is heard of rank 2 since rank 1 left (detached or closed its heap)" in text and "alive" not in text
    assert "(3 x odc.timeout_s)" in text


def test_a_death_behind_a_contact_that_left_is_seen_at_once(start: Start) -> None:
    machine = start(LONELY, timeout_s=20.0)
    machine.ask([1], _leave)
    machine.tell([0], _wait_for_rank, 2)
    machine.ranks.kill(2)
    began = time.monotonic()
    ((kind, text),) = machine.ranks.hear(0)
    assert kind == PeerError.__name__ and "rank 2 died" in text and time.monotonic() - began < 15.0


def _failing(heap: SymmetricHeap) -> str:
    """As the engine does: whoever fails tells the others why."""
    try:
        return _wait_for_all(heap)
    except PeerError as error:
        heap.abort(str(error))
        raise


def test_a_mate_with_another_contact_tells_of_a_death_at_once(start: Start) -> None:
    machine = start(TWO_BY_TWO, timeout_s=20.0)
    machine.ask([2], _leave)
    machine.tell([0, 1], _failing)
    machine.ranks.kill(3)
    began = time.monotonic()
    (_, first), (_, second) = machine.ranks.hear(0, 1)
    assert time.monotonic() - began < 15.0  # below one time-out
    assert "rank 3 died" in second and "rank 1 aborted: " in first and "rank 3 died" in first


def test_all_leave_at_once_and_nobody_is_taken_for_dead(start: Start) -> None:
    machine = start(TWO_BY_TWO)
    machine.tell(range(1, 4), _leave)
    assert machine.ask([0], _outlives) == [()]


def _outlives(heap: SymmetricHeap) -> tuple[int, ...]:
    """Who is taken for dead when the mate and the contact have left; the contact may have left before it could tell of rank 3."""
    deadline = time.monotonic() + 10
    while not heap._watcher.left >= {1, 2}:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.3)
    return heap._watcher.dead


def _fork(heap: SymmetricHeap) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return child


@pytest.mark.parametrize("victim", [0, 2])
def test_a_fork_does_not_hide_a_death(start: Start, victim: int) -> None:
    machine = start(TWO_AND_ONE)
    (child,) = machine.ask([victim], _fork)
    try:
        others = machine.others(victim)
        machine.tell(others, _wait_for_all)
        os.kill(machine.ranks.pid(victim), signal.SIGKILL)
        for _, text in machine.ranks.hear(*others):
            assert text.endswith(f"rank {victim} died (its process ended without a goodbye)")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
