"""What the others see when a rank dies, stops, hangs or leaves, with real processes."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from primus_odc.errors import PeerError, PeerTimeoutError
from primus_odc.symmetric.heap import SymmetricHeap
from tests.symmetric.harness import FileExchange, Ranks, make_heap

LONG_S = 60.0
"""A time-out that no test waits for: who fails earlier did not fail by it."""


def waits_for_the_last(rank: int, exchange: FileExchange, pipe: Connection, world_size: int, timeout_s: float) -> str:
    """Every rank but the last waits for a word that the last never writes; the last does as it is told."""
    heap = make_heap(rank, world_size, exchange, timeout_s=timeout_s)
    pipe.send("ready")
    if rank < world_size - 1:
        heap.wait(world_size - 1, "step", 0, 1, OPERATION)
        return "arrived"
    order = pipe.recv()
    if order == "raise":
        heap.abort("gradient of group layers.3 is not finite")
        time.sleep(LONG_S)
    elif order == "leave":
        heap.close()
        time.sleep(LONG_S)
    elif order == "leave after the word":
        heap.words.write("step", 1)
        heap.close()
    elif order == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(LONG_S)
            os._exit(0)
        pipe.send(child)
        time.sleep(LONG_S)
    elif order == "abort and die":
        heap.abort("out of memory in layers.3")
        os._exit(1)
    return order


def start(tmp_path: Path, world_size: int, timeout_s: float = LONG_S) -> Ranks:
    ranks = Ranks(world_size, tmp_path, waits_for_the_last, world_size, timeout_s)
    try:
        ranks.expect("ready")
    except BaseException:
        ranks.__exit__()
        raise
    return ranks


OPERATION = "gather of group layers.3 (epoch 7)"
WHAT = OPERATION + ": waiting for step[0] of rank {last} to reach 1"


def assert_says(text: str, rank: int, reason: str) -> None:
    """What was waited for is told as well if the wait had begun when it happened."""
    assert text.startswith(f"rank {rank}: {OPERATION}: ")
    assert text.endswith(f": {reason}")


def test_a_killed_rank_is_named_by_all_others_at_once(tmp_path: Path) -> None:
    with start(tmp_path, 4) as ranks:
        ranks.kill(3)
        for rank, (kind, text) in enumerate(ranks.hear(0, 1, 2)):
            assert kind == PeerError.__name__
            assert_says(text, rank, "rank 3 died (its process ended without a goodbye)")


def test_a_stopped_rank_is_timed_out_and_named(tmp_path: Path) -> None:
    with start(tmp_path, 2, timeout_s=0.6) as ranks:
        os.kill(ranks.pid(1), signal.SIGSTOP)
        ((kind, text),) = ranks.hear(0)
    assert kind == PeerTimeoutError.__name__
    assert text.startswith(f"rank 0: {WHAT.format(last=1)} (it is 0): no sign of life from rank 1 for ")
    assert text.endswith("(odc.timeout_s = 0.6)")


def waits_for_all(rank: int, exchange: FileExchange, pipe: Connection, timeout_s: float) -> str:
    """Waits for what all ranks do together, as a collective of a training script is."""
    heap = make_heap(rank, 3, exchange, timeout_s=timeout_s)
    pipe.send("ready")
    heap.wait_for(lambda: pipe.poll(0), "report of all ranks")
    return "done"


def test_a_stopped_rank_is_named_in_a_wait_for_all(tmp_path: Path) -> None:
    with Ranks(3, tmp_path, waits_for_all, 0.8) as ranks:
        ranks.expect("ready")
        os.kill(ranks.pid(1), signal.SIGSTOP)
        for rank, (kind, text) in zip((0, 2), ranks.hear(0, 2), strict=True):
            assert kind == PeerTimeoutError.__name__
            assert text.startswith(f"rank {rank}: report of all ranks: no sign of life from rank 1 for ")
            assert text.endswith("(odc.timeout_s = 0.8)")


def test_a_wait_for_all_ends_with_the_hard_cap_or_when_it_is_done(tmp_path: Path) -> None:
    with Ranks(3, tmp_path, waits_for_all, 0.4) as ranks:
        ranks.expect("ready")
        ranks.tell("done", 0)
        done, first, second = ranks.hear()
        assert done == "done" and all(kind == PeerTimeoutError.__name__ for kind, _ in (first, second))
        assert "not all ranks got there in " in first[1] and "raise odc.timeout_s" in first[1]


def test_a_stopped_rank_that_goes_on_in_time_does_no_harm(tmp_path: Path) -> None:
    with start(tmp_path, 2, timeout_s=5.0) as ranks:
        os.kill(ranks.pid(1), signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(ranks.pid(1), signal.SIGCONT)
        ranks.tell("leave after the word", 1)
        assert ranks.hear(0, 1) == ["arrived", "leave after the word"]


def test_a_busy_rank_that_beats_is_given_up_at_the_hard_cap_only(tmp_path: Path) -> None:
    with start(tmp_path, 2, timeout_s=0.4) as ranks:
        ((kind, text),) = ranks.hear(0)
    assert kind == PeerTimeoutError.__name__
    assert f"{WHAT.format(last=1)} (it is 0): that rank is alive but did not get there in " in text
    assert "raise odc.timeout_s" in text


def test_leaving_is_not_dying(tmp_path: Path) -> None:
    with start(tmp_path, 3) as ranks:
        ranks.tell("leave", 2)
        for rank, (kind, text) in enumerate(ranks.hear(0, 1)):
            assert kind == PeerError.__name__
            assert text == f"rank {rank}: {WHAT.format(last=2)}: rank 2 left (detached or closed its heap) and will never get there"


def test_an_abort_ends_the_waits_of_all(tmp_path: Path) -> None:
    with start(tmp_path, 3) as ranks:
        ranks.tell("raise", 2)
        for rank, (kind, text) in enumerate(ranks.hear(0, 1)):
            assert kind == PeerError.__name__
            assert_says(text, rank, "rank 2 aborted: gradient of group layers.3 is not finite")


def test_last_words_of_a_rank_that_aborts_and_dies_are_told(tmp_path: Path) -> None:
    with start(tmp_path, 3) as ranks:
        ranks.tell("abort and die", 2)
        for kind, text in ranks.hear(0, 1):
            assert kind == PeerError.__name__
            assert "rank 2 died after: out of memory in layers.3" in text or "rank 2 aborted: out of memory in layers.3" in text


def test_a_forked_child_does_not_hide_its_parents_death(tmp_path: Path) -> None:
    with start(tmp_path, 2) as ranks:
        ranks.tell("fork", 1)
        (child,) = ranks.hear(1)
        try:
            os.kill(ranks.pid(1), signal.SIGKILL)  # the child, a data loader worker say, lives on
            ((kind, text),) = ranks.hear(0)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
    assert kind == PeerError.__name__
    assert "rank 1 died" in text


def test_a_forked_child_leaves_its_parents_heap_alone(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, _forks_a_child_that_closes) as ranks:
        assert ranks.hear() == ["child ended with 0", "child ended with 0"]


def _forks_a_child_that_closes(rank: int, exchange: FileExchange, pipe: Connection) -> str:
    heap = make_heap(rank, 2, exchange)
    child = os.fork()
    if child == 0:
        heap.close()
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    heap.words.write("step", 1)
    heap.wait(1 - rank, "step", 0, 1, "settle")
    heap.words.write("step", 2)
    heap.wait(1 - rank, "step", 0, 2, "settle")
    heap.close()
    return f"child ended with {status}"


def test_ping_pong_and_data_between_processes(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, _ping_pong, 300) as ranks:
        assert ranks.hear() == [300, 300]


def _ping_pong(rank: int, exchange: FileExchange, pipe: Connection, rounds: int) -> int:
    heap = make_heap(rank, 2, exchange)
    good = 0
    for n in range(1, rounds + 1):
        mine, theirs = heap.view(rank, heap.plan.regions["data"]), heap.view(1 - rank, heap.plan.regions["data"])
        if rank == 0:
            mine.fill_(n % 251)
            heap.words.write("step", n)
        heap.wait(1 - rank, "step", 0, n, "ping-pong")
        if rank == 1:
            mine.copy_(theirs)
            heap.words.write("step", n)
        good += int(theirs.min()) == int(theirs.max()) == n % 251
        heap.words.write("tick", n, rank)
        heap.wait(1 - rank, "tick", 1 - rank, n, "ping-pong")
    _leave(heap)
    return good


def _leave(heap: SymmetricHeap) -> None:
    heap.words.write("closed", 1)
    for rank in range(heap.world_size):
        heap.wait(rank, "closed", 0, 1, "detach")
    heap.close()


def _segment_inodes(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:primus_odc_rank" in line}


def _mapped_anywhere(inodes: set[str]) -> list[str]:
    holders = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # ended meanwhile, or not ours to read
            continue
        holders += [line for line in text.splitlines() if "/memfd:primus_odc_rank" in line and line.split()[4] in inodes]
    return holders


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def _abstract_names(inodes: set[str]) -> set[str]:
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("@primus_odc-")}


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    with start(tmp_path, 3) as ranks:
        pids = [ranks.pid(r) for r in range(3)]
        segments = set().union(*(_segment_inodes(pid) for pid in pids))
        sockets = set().union(*(_socket_inodes(pid) for pid in pids))
        names = _abstract_names(sockets)
        assert len(segments) == 3
        assert names, "the accepting ends carry the listener's name while they live"
        for rank in range(3):
            os.kill(ranks.pid(rank), signal.SIGKILL)
        for process in ranks.processes:
            process.join(20)
    assert _mapped_anywhere(segments) == []
    rows = Path("/proc/net/unix").read_text()
    assert not [name for name in names if name in rows]
    assert not [name for name in os.listdir("/dev/shm") if "primus_odc" in name]


def test_the_next_run_starts_after_a_crash(tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        directory = tmp_path / attempt
        directory.mkdir()
        with start(directory, 2) as ranks:
            ranks.kill(1)
            assert ranks.hear(0)[0][0] == PeerError.__name__
