"""The heap's memory, words and waits, with all ranks as threads of one process (each maps every segment on its own)."""

from __future__ import annotations

import gc
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from primus_odc.errors import OdcError, PeerError, PeerTimeoutError
from primus_odc.symmetric.arena import ArenaPlan
from primus_odc.symmetric.board import ABORT_TEXT_BYTES
from primus_odc.symmetric.heap import SymmetricHeap
from tests.symmetric.harness import all_good, in_threads, make_heap

Exchange = Callable[[Any], list[Any]]


def heaps(world_size: int, **options: Any) -> list[SymmetricHeap]:
    return all_good(in_threads(world_size, lambda rank, exchange: make_heap(rank, world_size, exchange, **options)))


def close(*ranks: SymmetricHeap) -> None:
    for heap in ranks:
        heap.close()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_sees_every_arena(world_size: int) -> None:
    ranks = heaps(world_size, regions={"a": 100, "empty": 0, "b": 1000})
    for writer in ranks:
        for owner in range(world_size):
            view = writer.view(owner, writer.plan.regions["b"])
            assert view.dtype == torch.uint8
            assert view.shape == (1000,)
            view[writer.rank * 10] = 1 + writer.rank + 16 * owner
    for reader in ranks:
        for owner in range(world_size):
            b = reader.view(owner, reader.plan.regions["b"])
            assert [int(b[w * 10]) for w in range(world_size)] == [1 + w + 16 * owner for w in range(world_size)]
            assert int(b.count_nonzero()) == world_size
            assert int(reader.view(owner, reader.plan.regions["a"]).count_nonzero()) == 0
            assert reader.view(owner, reader.plan.regions["empty"]).numel() == 0
    close(*ranks)


def test_regions_hold_any_dtype_and_leave_words_alone() -> None:
    ranks = heaps(2)
    ranks[0].words.write("step", 41)
    view = ranks[1].view(0, ranks[1].plan.regions["data"])
    view.fill_(255)
    ranks[1].view(0, ranks[1].plan.regions["data"]).view(torch.float64)[-1] = 2.5
    assert ranks[0].view(0, ranks[0].plan.regions["data"]).view(torch.float64)[-1] == 2.5
    assert ranks[1].words.read(0, "step") == 41
    assert ranks[0].words.read(0, "abort") == 0
    assert ranks[0].arena_nbytes > 4096
    close(*ranks)


def test_wait_returns_when_the_word_is_there_and_counts_the_time() -> None:
    ranks = heaps(2)
    ranks[0].waited_s.clear()
    ranks[1].words.write("tick", 3, 2)
    ranks[0].wait(1, "tick", 2, 3, "gather of group x")
    assert ranks[0].waited_s == {}

    timer = threading.Timer(0.05, lambda: ranks[1].words.write("tick", 4, 2))
    timer.start()
    ranks[0].wait(1, "tick", 2, 4, "gather of group x")
    timer.join()
    assert list(ranks[0].waited_s) == ["gather"]
    assert ranks[0].waited_s["gather"] > 0
    close(*ranks)


def test_a_rank_that_left_only_matters_to_who_still_needs_it() -> None:
    ranks = heaps(3)
    ranks[2].words.write("step", 5)
    ranks[2].close()
    while 2 not in ranks[0]._watcher.left:
        time.sleep(0.001)
    ranks[0].wait(2, "step", 0, 5, "settle")
    threading.Timer(0.02, lambda: ranks[1].words.write("step", 1)).start()
    ranks[0].wait(1, "step", 0, 1, "settle")
    with pytest.raises(PeerError, match=r"rank 0: settle: waiting for step\[0\] of rank 2 to reach 6: rank 2 left") as caught:
        ranks[0].wait(2, "step", 0, 6, "settle")
    assert not isinstance(caught.value, PeerTimeoutError)
    close(*ranks)


def test_all_leave_at_once_and_nobody_is_taken_for_dead() -> None:
    for _ in range(10):
        ranks = heaps(3)
        threads = [threading.Thread(target=heap.close) for heap in ranks[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while len(ranks[2]._watcher.left) < 2:
            assert not ranks[2]._watcher.dead
            time.sleep(0.001)
        close(*ranks)


def test_an_abort_reaches_all_with_its_text() -> None:
    ranks = heaps(3)
    ranks[1].abort("shard of layer 3: checksum differs")
    ranks[1].abort("a later message does not replace the first")
    for heap in (ranks[0], ranks[2]):
        with pytest.raises(PeerError, match=f"rank {heap.rank}: publish: rank 1 aborted: shard of layer 3: checksum differs$"):
            heap.wait(0, "step", 0, 0, "publish")
    with pytest.raises(PeerError, match="rank 1: publish: this rank failed before: shard of layer 3"):
        ranks[1].check("publish")
    close(*ranks)


@pytest.mark.parametrize("text", ["", "ü" * ABORT_TEXT_BYTES])
def test_abort_texts_of_any_length(text: str) -> None:
    ranks = heaps(2)
    ranks[0].abort(text)
    with pytest.raises(PeerError, match=r"rank 0 aborted: (no message|ü{500,})"):
        ranks[1].check("gather")
    close(*ranks)


def test_the_hard_cap_ends_a_wait_for_a_rank_that_beats() -> None:
    ranks = heaps(2, timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=r"step\[0\] of rank 1 to reach 1 \(it is 0\): that rank is alive but did not get there"):
        ranks[0].wait(1, "step", 0, 1, "settle")
    # Three times the time-out: a beating peer was not given up after one.
    assert time.monotonic() - started >= 0.9
    close(*ranks)


def test_start_up_pattern_test_finds_a_private_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = mmap.mmap

    def private_in_rank_1(fd: int, nbytes: int, flags: int, access: int) -> mmap.mmap:
        mine = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:primus_odc_rank{threading.current_thread().name}")
        copied = threading.current_thread().name == "1" and not mine
        return shared(fd, nbytes, mmap.MAP_PRIVATE if copied else flags, access)

    def main(rank: int, exchange: Exchange) -> SymmetricHeap:
        threading.current_thread().name = str(rank)
        # The words of the other rank stay visible, on a page nobody copies on write; the probes stand behind the data.
        return make_heap(rank, 2, exchange, regions={"data": 1 << 16})

    monkeypatch.setattr(mmap, "mmap", private_in_rank_1)
    results = in_threads(2, main)
    assert [isinstance(r, OdcError) for r in results] == [True, True], results
    # Whoever looks first tells the other: rank 1 reads its stale copy, rank 0 misses what rank 1 wrote into a copy.
    assert re.search("rank 0: start-up pattern test with rank 1 failed: .* pushed 0x0|rank 1: start-up .* failed: pulled 0x0", str(results))


def test_a_watcher_that_fails_fails_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = heaps(2)

    def broken() -> None:
        raise RuntimeError("no more beats")

    monkeypatch.setattr(ranks[0]._board, "beat", broken)
    reason = "the thread that watches the other ranks failed: RuntimeError: no more beats"
    with pytest.raises(PeerError, match=f"rank 0 aborted: {reason}"):
        ranks[1].wait(0, "step", 0, 1, "settle")
    with pytest.raises(PeerError, match=f"this rank failed before: {reason}"):
        ranks[0].check("gather")
    close(*ranks)


class _Stuck:
    """Memory that cannot be closed, as of a device that does not finish."""

    network = None

    def __init__(self, arenas: dict[int, torch.Tensor]) -> None:
        self.arenas = arenas

    def store(self, rank: int, offset: int, value: int) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        raise OdcError("the GPU did not finish")


def test_a_rank_whose_memory_cannot_be_closed_says_so_and_leaves() -> None:
    arenas = {rank: torch.zeros(4096, dtype=torch.uint8) for rank in range(2)}
    gc.collect()
    descriptors = _descriptors()

    def main(rank: int, exchange: Exchange) -> SymmetricHeap:
        return SymmetricHeap(rank, ["rank 0", "rank 1"], ArenaPlan(), {"step": 1}, exchange, 10.0, lambda *_: _Stuck(arenas))

    ranks = all_good(in_threads(2, main))
    with pytest.raises(OdcError, match="the GPU did not finish"):
        ranks[0].close()
    with pytest.raises(PeerError, match=r"rank 0 (died after|aborted): closing the heap: the GPU did not finish"):
        ranks[1].wait(0, "step", 0, 1, "settle")
    with pytest.raises(OdcError, match="the GPU did not finish"):
        ranks[1].close()
    ranks.clear()
    gc.collect()
    assert _descriptors() == descriptors


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:primus_odc" in line for line in maps)


def test_fifty_heaps_leave_no_descriptor_and_no_mapping_even_without_garbage_collector() -> None:
    close(*heaps(2))
    gc.collect()
    descriptors, segments = _descriptors(), _segments()
    gc.disable()
    try:
        for _ in range(50):
            close(*heaps(2))
        assert _descriptors() == descriptors
        assert _segments() <= segments
    finally:
        gc.enable()


def test_views_outlive_the_heap() -> None:
    ranks = heaps(2)
    view = ranks[0].view(1, ranks[0].plan.regions["data"])
    view.fill_(7)
    close(*ranks)
    ranks.clear()
    assert int(view.sum()) == 7 * 4096
