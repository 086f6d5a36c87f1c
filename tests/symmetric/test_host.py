"""The bootstrap of the host transport: what it refuses, and who is named when it cannot be completed."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import resource
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from primus_odc.errors import OdcError, PeerTimeoutError
from primus_odc.symmetric import host
from tests.symmetric.harness import FileExchange, Ranks, in_threads, make_heap

Exchange = Callable[[Any], list[Any]]
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_different_sizes_are_refused_by_all() -> None:
    results = in_threads(3, lambda rank, exchange: make_heap(rank, 3, exchange, regions={"data": 4096 * (1 + rank // 2)}))
    for rank, error in enumerate(results):
        assert isinstance(error, OdcError), error
        assert f"rank {rank}: the ranks plan arenas of different sizes" in str(error)


def test_more_memory_than_the_host_has_is_refused_before_any_is_taken() -> None:
    results = in_threads(2, lambda rank, exchange: make_heap(rank, 2, exchange, regions={"data": 1 << 44}))
    for error in results:
        assert isinstance(error, OdcError), error
        assert "need 32768.00 GiB and their host has" in str(error)
        assert "odc.accumulate: owner" in str(error)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_peer_that_disappears_in_the_bootstrap_is_named(missing: int) -> None:
    before = _descriptors()

    def main(rank: int, exchange: Exchange) -> Any:
        def and_gone(card: Any) -> list[Any]:
            exchange(card)
            raise InterruptedError("gone")

        return make_heap(rank, 3, and_gone if rank == missing else exchange, timeout_s=0.5)

    results = in_threads(3, main)
    for rank, error in enumerate(results):
        if rank != missing:
            assert isinstance(error, PeerTimeoutError), error
            assert f"{missing}" in str(error).split("did not join the heap within 0.5 s")[0].split("ranks", 1)[1]
    del results, error
    assert _descriptors() == before


def test_what_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no address space")

    before = _descriptors()
    monkeypatch.setattr(mmap, "mmap", full)
    results = in_threads(2, lambda rank, exchange: make_heap(rank, 2, exchange))
    for rank, error in enumerate(results):
        assert isinstance(error, OdcError), error
        assert f"rank {rank}: cannot map the shared memory of 2 ranks" in str(error) and "no address space" in str(error)
    del results, error
    assert _descriptors() == before


def test_the_descriptor_of_a_segment_of_another_size_is_kept_to_be_closed() -> None:
    near, far = socket.socketpair()
    brought, descriptors = host.make_segment(4096, 1), dict[int, int]()
    with near, far:
        host._send_hello(far, 1, 4096, brought)
        with pytest.raises(OdcError, match="rank 1 brought a segment of 4096 bytes, expected 8192"):
            host._receive_hello(near, descriptors, 8192)
    os.close(brought)
    assert list(descriptors) == [1]
    os.close(descriptors[1])


def test_a_peer_that_listens_but_never_answers_is_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "make_segment", _stuck_for_rank_0(host.make_segment))
    results = in_threads(2, lambda rank, exchange: make_heap(rank, 2, exchange, timeout_s=0.5))
    assert isinstance(results[1], PeerTimeoutError), results
    assert "rank 1: ranks [0] did not join" in str(results[1])


def _stuck_for_rank_0(make_segment: Callable[[int, int], int]) -> Callable[[int, int], int]:
    import time

    def stuck(nbytes: int, rank: int) -> int:
        if rank == 0:
            time.sleep(1.0)
        return make_segment(nbytes, rank)

    return stuck


def test_a_late_rank_does_not_use_up_the_time_of_the_early_ones() -> None:
    import time

    def main(rank: int, exchange: Exchange) -> Any:
        if rank == 1:
            time.sleep(0.8)
        return make_heap(rank, 2, exchange, timeout_s=0.5)

    for heap in in_threads(2, main):
        assert not isinstance(heap, BaseException), heap
        heap.close()


def test_a_rank_that_cannot_commit_its_memory_says_how_much(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, _limited_file_size) as ranks:
        errors = ranks.hear()
    assert errors[1][0] == "OdcError"
    assert "rank 1: cannot commit 8.0 MiB of shared memory: File too large" in errors[1][1]
    assert errors[0][0] == "PeerTimeoutError"
    assert "ranks [1] did not join" in errors[0][1]


def _limited_file_size(rank: int, exchange: FileExchange, pipe: Connection) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    make_heap(rank, 2, exchange, regions={"data": 8 << 20}, timeout_s=1.0)
    return "made"


def test_another_network_namespace_is_refused(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, _own_network) as ranks:
        answers = ranks.hear()
    if "no permission" in answers:
        pytest.skip("this machine lets nobody make a network namespace")
    for rank, (kind, text) in enumerate(answers):
        assert kind == "OdcError"
        assert f"rank {rank}: ranks [{1 - rank}] run on another host or in another network namespace" in text


def _own_network(rank: int, exchange: FileExchange, pipe: Connection) -> str:
    if rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        user = 0 if os.geteuid() == 0 else CLONE_NEWUSER
        permitted = libc.unshare(CLONE_NEWNET | user) == 0
    else:
        permitted = True
    if not all(exchange(permitted)):
        return "no permission"
    make_heap(rank, 2, exchange, timeout_s=1.0)
    return "made"


def test_another_host_is_refused() -> None:
    cards = [host._Card(name, "address", 100, 1 << 30) for name in ("a", "b", "a")]
    with pytest.raises(OdcError, match=r"rank 0: ranks \[1\] run on another host"):
        host._check_cards(cards, 0, [0, 0, 0])
    with pytest.raises(OdcError, match=r"rank 1: ranks \[0, 2\] run on another host"):
        host._check_cards(cards, 1, [0, 0, 0])
    host._check_cards([dataclasses.replace(c, host="a") for c in cards], 0, [0, 0, 0])


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OdcError, match="this machine is aarch64"):
        host.require_host_transport()


def _cgroup(directory: Path, limit: str, current: int, cached: int) -> str:
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 5\nfile {cached + 5}\ninactive_file {cached - 10}\nactive_file 10\nshmem 5\n")
    return str(directory)


def test_memory_limit_of_the_cgroup_counts_and_cached_files_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUP", str(tmp_path / "none"))
    machine = host.available_memory()
    monkeypatch.setattr(host, "CGROUP", _cgroup(tmp_path, "1000000", 900000, 600000))
    assert host.available_memory() == 700000
    monkeypatch.setattr(host, "CGROUP", _cgroup(tmp_path, "max", 900000, 600000))
    assert host.available_memory() > 700000
    assert machine > 700000
