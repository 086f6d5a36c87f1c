"""Writes into other nodes over a made-up library: what is launched and where it arrives, with threads as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from primus_odc.errors import OdcError
from primus_odc.symmetric.arena import align
from primus_odc.symmetric.shmem.network import LibraryMemory
from tests.symmetric.shmem.fake_library import CPU, Job, without_gpu

NBYTES = 1000
FAR_WORDS = 5


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


def on_every_rank(
    job: Job,
    function: Callable[[int, LibraryMemory, torch.Tensor], object],
    far_words: int = FAR_WORDS,
    pes: Sequence[int] | None = None,
) -> list[object]:
    """``function(rank, memory, its control words)``; an error stands in its place. ``pes``: of every rank; None: the same numbers."""
    order = range(len(job.nodes)) if pes is None else pes
    names, nodes = [job.names[pe] for pe in order], [job.nodes[pe] for pe in order]

    def rank_main(rank: int) -> object:
        job.enter(order[rank])
        words, store = torch.zeros(32, dtype=torch.uint8), PrefixStore("case", job.store)
        try:
            made = LibraryMemory("nvshmem", NBYTES, far_words, rank, order, names, nodes, store, CPU, words, timeout_s=job.timeout_s)
            return function(rank, made, words)
        except OdcError as error:
            return error

    with ThreadPoolExecutor(len(job.nodes)) as pool:
        return list(pool.map(rank_main, range(len(job.nodes))))


def put(memory: LibraryMemory, rank: int, offset: int, start: int, stop: int) -> None:
    assert memory.network is not None
    memory.network.put(rank, offset, own(memory)[start:stop])


def own(memory: LibraryMemory) -> torch.Tensor:
    return memory.arenas[memory._rank]


@pytest.mark.parametrize("pes", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=str)
def test_data_arrive_with_the_word_that_is_signalled_behind_them(pes: list[int]) -> None:
    job = Job([0 if pes.index(pe) < 2 else 1 for pe in range(4)])

    def use(rank: int, memory: LibraryMemory, words: torch.Tensor) -> object:
        net = memory.network
        assert net is not None and sorted(memory.arenas) == ([0, 1] if rank < 2 else [2, 3])
        assert [arena.numel() for arena in memory.arenas.values()] == [NBYTES] * 2
        own(memory)[:100] = rank + 1
        own(memory)[100:108] = 40 + rank
        puts = job.library.arenas[pes[rank]].puts
        puts.clear()  # those of the start-up test
        job.library.together.wait(20)
        if rank == 1:
            put(memory, 2, 300, 0, 100)
            put(memory, 3, 500, 0, 60)
            put(memory, 2, 920, 100, 108)
            assert puts == []  # nothing leaves before its word
            net.signal(3, 4, 7)
            net.signal(2, 0, 9)
            assert puts == []  # nor one rank's before another's
            net.signal(2, 1, 10)  # no data
            assert len(puts) == 2  # words for one rank stay in order
            net.submit()
            net.submit()
        job.library.together.wait(20)
        seen = {home: net.far_words(home).tolist() for home in memory.arenas}
        arrived = [own(memory)[start:stop].tolist() for start, stop in ((300, 400), (500, 560), (920, 928))]
        return puts, arrived, seen

    results: list[Any] = on_every_rank(job, use, pes=pes)
    # One launch for the words of several ranks; what comes before its last data has a launch of its own, since queue pairs differ.
    assert [sorted(launch) for launch in results[1][0]] == [
        [(pes[2], 100, 0)],
        sorted([(pes[3], 60, 7), (pes[2], 8, 9)]),
        [(pes[2], 0, 10)],
    ]
    assert results[2][1] == [[2] * 100, [0] * 60, [41] * 8] and results[3][1] == [[0] * 100, [2] * 60, [0] * 8]
    expected = {2: [9, 10, 0, 0, 0], 3: [0, 0, 0, 0, 7]}
    assert results[2][2] == results[3][2] == expected  # also those of a mate
    assert results[0][2] == {0: [0] * 5, 1: [0] * 5}


def test_far_words_lie_behind_the_arena_and_are_kept_apart() -> None:
    job = Job([0, 1])

    def use(rank: int, memory: LibraryMemory, words: torch.Tensor) -> object:
        net = memory.network
        assert net is not None
        own(memory)[:] = 0xAB
        job.library.together.wait(20)
        for position in range(FAR_WORDS):
            net.signal(1 - rank, position, 1 << 40 | position)
        net.submit()
        for position in (-1, FAR_WORDS):
            with pytest.raises(IndexError, match="there are 5"):
                net.signal(1 - rank, position, 1)
        job.library.together.wait(20)
        assert bool((own(memory) == 0xAB).all())
        with pytest.raises(ValueError, match="rank 1: its arena is not mapped" if rank == 0 else "rank 0: its arena is not mapped"):
            net.far_words(1 - rank)
        return net.far_words(rank).tolist(), int.from_bytes(bytes(job.library.arenas[rank].bytes[align(NBYTES) :][:8]), "little")

    assert on_every_rank(job, use) == [([1 << 40 | position for position in range(FAR_WORDS)], 1 << 40)] * 2


def test_what_no_card_could_read_is_refused() -> None:
    def use(rank: int, memory: LibraryMemory, words: torch.Tensor) -> None:
        net = memory.network
        assert net is not None
        net.put(1 - rank, 0, torch.zeros(8, dtype=torch.uint8))
        net.signal(1 - rank, 0, 1)
        with pytest.raises(ValueError, match="memory of the arena only"):
            net.submit()
        with pytest.raises(ValueError, match="contiguous bytes"):
            net.put(1 - rank, 0, own(memory)[:16].view(torch.int64))
        with pytest.raises(ValueError, match="leaves the arena"):
            put(memory, 1 - rank, 600, 0, 500)

    assert on_every_rank(Job([0, 1]), use) == [None] * 2


def test_in_one_node_there_is_no_network() -> None:
    def use(rank: int, memory: LibraryMemory, words: torch.Tensor) -> object:
        memory.store(rank, 8, 3)
        with pytest.raises(ValueError, match="nobody stores words of another rank"):
            memory.store(1 - rank, 8, 3)
        memory.synchronize()
        memory.close()
        return memory.network, sorted(memory.arenas), words.view(torch.int64).tolist(), memory._writer.closed  # type: ignore[attr-defined]

    assert on_every_rank(Job([0, 0]), use, far_words=0) == [(None, [0, 1], [0, 3, 0, 0], True)] * 2


def test_a_mate_that_is_not_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([0, 0])
    monkeypatch.setattr("tests.symmetric.shmem.fake_library.Arena.peer_address", lambda self, pe: 0)
    for rank, error in enumerate(on_every_rank(job, lambda rank, memory, words: None)):
        assert f"rank {rank}: nvshmem does not map the memory of rank {1 - rank}, of the same node" in str(error)
