"""Operations on arenas, with threads as PEs and a made-up library: what is launched, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primus_odc.errors import OdcError, PeerTimeoutError, VerificationError
from primus_odc.symmetric.shmem.memory import ShmemMemory
from primus_odc.symmetric.shmem.plan import Read, Signal, Wait, Write
from tests.symmetric.shmem.fake_library import Job, without_gpu

NBYTES = 1000
WORDS = 512


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


def on_every_pe(job: Job, function: Callable[[int, ShmemMemory], object]) -> list[object]:
    """``function(rank, memory)`` on every PE; an error stands in its place."""

    def pe(rank: int) -> object:
        try:
            return function(rank, job.memory(rank, NBYTES))
        except OdcError as error:
            return error

    with ThreadPoolExecutor(len(job.nodes)) as pool:
        return list(pool.map(pe, range(len(job.nodes))))


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 2], [0, 0, 1, 1, 1]], ids=str)
def test_every_operation_reaches_every_pe(nodes: list[int]) -> None:
    pes = range(len(nodes))

    def use(rank: int, memory: ShmemMemory) -> list[list[int]]:
        assert memory.arena[:WORDS].tolist() == [0] * WORDS  # behind it a faster peer may have stored its word
        assert [memory.peer(pe) is not None for pe in pes] == [node == nodes[rank] for node in nodes]
        memory.arena[:8] = rank + 1
        base = memory.map.base
        memory.signal([Signal(pe, WORDS + 8 * rank, 1) for pe in pes])
        memory.wait([Wait(pe, WORDS + 8 * pe, 1) for pe in pes])
        memory.get([Read(pe, 0, base + 100 + 8 * pe, 8) for pe in pes])
        memory.put([Write(pe, 200 + 8 * rank, base, 8, WORDS + 8 * rank, 2) for pe in pes])
        memory.put([Write(pe, 0, 0, 0, WORDS + 8 * rank, 3) for pe in pes])  # a signal without data
        memory.wait([Wait(pe, WORDS + 8 * pe, 3) for pe in pes])
        memory.synchronize("test")
        return [
            memory.arena[100 : 100 + 8 * len(nodes)].tolist(),
            memory.arena[200 : 200 + 8 * len(nodes)].tolist(),
            memory.words(WORDS, len(nodes)).tolist(),
        ]

    gathered = [pe + 1 for pe in pes for _ in range(8)]
    assert on_every_pe(Job(nodes), use) == [[gathered, gathered, [3] * len(nodes)]] * len(nodes)


def test_sums_of_more_sources_than_a_launch_takes_keep_their_order() -> None:
    def use(rank: int, memory: ShmemMemory) -> None:
        for dtype in (torch.float32, torch.float64):
            sources = list(torch.randn(11, 7, generator=torch.Generator().manual_seed(1), dtype=dtype))
            for count in (0, 1, 3, 4, 11):
                out = torch.full((7,), float("nan"), dtype=dtype)
                memory.reduce(out, sources[:count])
                expected = torch.zeros(7, dtype=dtype)
                for source in sources[:count]:
                    expected += source
                assert torch.equal(out, expected)
        memory.reduce(torch.empty(0), [torch.empty(0)])

    assert on_every_pe(Job([0]), use) == [None]


@pytest.mark.parametrize(
    "out, source",
    [(torch.zeros(4), torch.zeros(5)), (torch.zeros(4), torch.zeros(4, dtype=torch.float64)), (torch.zeros(4), torch.zeros(8)[::2])],
)
def test_sums_of_what_does_not_fit_are_refused(out: torch.Tensor, source: torch.Tensor) -> None:
    def use(rank: int, memory: ShmemMemory) -> None:
        with pytest.raises(ValueError, match="does not fit"):
            memory.reduce(out, [source])
        with pytest.raises(ValueError, match="float32 or float64"):
            memory.reduce(torch.zeros(4, dtype=torch.bfloat16), [])

    assert on_every_pe(Job([0]), use) == [None]


def test_a_word_that_does_not_come_is_told_with_its_name_and_nothing_follows() -> None:
    job = Job([0, 1])

    def use(rank: int, memory: ShmemMemory) -> None:
        if rank == 0:
            memory.wait([Wait(1, WORDS + 16, 9)], timeout_s=0.05)
            memory.put([Write(1, 0, memory.map.base, 8, WORDS, 1)])
            memory.synchronize("settle of minibatch 3")

    error, none = on_every_pe(job, use)
    assert isinstance(error, PeerTimeoutError) and none is None
    assert (
        str(error)
        == f"rank 0: settle of minibatch 3: rank 1 did not store 9 in time in the word at byte {WORDS + 16} of this rank's arena: it is 0"
    )
    assert job.library.arenas[1].bytes[WORDS] == 0


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]], ids=str)
def test_a_wrong_mapping_is_found_at_start(nodes: list[int]) -> None:
    job = Job(nodes, timeout_s=1.0)
    job.library.mapping = [0, 0, 2]  # what should show PE 1 shows PE 0

    errors = on_every_pe(job, lambda rank, memory: None)
    told = [str(error) for error in errors if isinstance(error, VerificationError)]
    assert told and all("start-up pattern test: pattern test with rank" in text for text in told), errors
    assert all(isinstance(error, OdcError) for error in errors), errors  # nobody starts


def test_memories_follow_each_other_on_one_library_and_a_closed_arena_is_freed_with_the_next() -> None:
    job = Job([0, 1, 1])

    def use(rank: int, first: ShmemMemory) -> list[int]:
        second = job.memory(rank, NBYTES, start=2)  # two at a time
        assert job.library.released == [0, 0, 0]
        first.close()
        second.put([Write(pe, 8 * rank, second.map.base + 512, 8) for pe in range(3)])
        third = job.memory(rank, 2 * NBYTES, start=3)
        if rank:
            second.close()
        fourth = job.memory(rank, 2 * NBYTES, start=4)
        assert bool((fourth.arena == 0).all()) and third.map.base != fourth.map.base
        return [job.library.started[rank], job.library.released[rank]]

    # The second was not closed everywhere, so it stays.
    assert on_every_pe(job, use) == [[1, 1]] * 3


def test_a_library_serves_one_set_of_ranks() -> None:
    job = Job([0, 1])

    def use(rank: int, memory: ShmemMemory) -> None:
        job.names = ["rank 4", "rank 5"]
        job.memory(rank, NBYTES, start=2)

    errors = [str(error) for error in on_every_pe(job, use)]
    assert all("this model is on rank 4, rank 5, while it runs for rank 0, rank 1" in text for text in errors), errors


def test_a_heap_without_room_for_a_later_engine_says_what_to_set() -> None:
    job = Job([0, 1])

    def use(rank: int, memory: ShmemMemory) -> None:
        job.library.full = True
        job.memory(rank, NBYTES, start=2)

    for error in on_every_pe(job, use):
        assert "no " in str(error) and "set NVSHMEM_SYMMETRIC_SIZE to what all engines need" in str(error), error


def test_words_outside_the_arena_are_refused() -> None:
    def use(rank: int, memory: ShmemMemory) -> None:
        for offset, count in ((4, 1), (-8, 1), (memory.map.nbytes, 1), (0, memory.map.nbytes)):
            with pytest.raises(ValueError, match="multiples of 8"):
                memory.words(offset, count)
        assert len(memory.words(0, 700)) == 700

    assert on_every_pe(Job([0]), use) == [None]
