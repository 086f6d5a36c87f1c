"""Start-up over a torch store: threads as ranks, a made-up library. Who is missing is named, whatever stage it did not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch.distributed import HashStore, PrefixStore

from primus_odc.errors import OdcError, PeerTimeoutError
from primus_odc.symmetric.gathering import Gathering
from primus_odc.symmetric.shmem.bootstrap import start_library

TIMEOUT_S = 1.5


class Library:
    """The native module as start-up sees it, of one rank: ``init`` returns once all ranks are in it."""

    def __init__(self, rank: int, everybody: threading.Barrier) -> None:
        self.started_by: str | None = None
        self.fails = False
        self._rank = rank
        self._everybody = everybody
        self.ids: list[bytes] = []
        self.machines: list[int] = []

    def initialized(self) -> bool:
        return self.started_by is not None

    def unique_id(self) -> bytes:
        return b"\0id\xff" * 32

    def init(self, rank: int, ranks: int, id: bytes) -> None:
        assert (rank, ranks) == (self._rank, self._everybody.parties)
        if self.fails:
            raise RuntimeError("no network card")
        self._everybody.wait(30)
        self.started_by = threading.current_thread().name
        self.ids.append(id)

    def rank(self) -> int:
        return self._rank


def start(
    ranks: int, change: Callable[[int, Library], bool] = lambda rank, library: True
) -> tuple[list[Library], list[BaseException | None], float]:
    """Start ``ranks`` threads; ``change`` may spoil a rank's library, and says whether that rank comes at all."""
    store = PrefixStore("case", HashStore())
    everybody = threading.Barrier(ranks)
    libraries = [Library(r, everybody) for r in range(ranks)]
    errors: list[BaseException | None] = [None] * ranks

    def rank(r: int) -> None:
        try:
            gathering = Gathering(store, r, [f"rank {n}" for n in range(ranks)], TIMEOUT_S)
            start_library(
                cast(Any, libraries[r]), gathering, None, lambda machines, _: libraries[r].machines.append(machines), lambda: None
            )
        except OdcError as error:
            errors[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks) if change(r, libraries[r])]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    took = time.monotonic() - started
    everybody.abort()
    return libraries, errors, took


def test_all_ranks_start_with_the_id_of_rank_0_in_a_thread_of_its_own() -> None:
    libraries, errors, _ = start(5)
    assert errors == [None] * 5
    assert [library.ids for library in libraries] == [[b"\0id\xff" * 32]] * 5
    assert {library.started_by for library in libraries} == {"primus_odc started"}
    assert [library.machines for library in libraries] == [[1]] * 5


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    libraries, errors, took = start(3, lambda rank, library: rank != absent)
    for rank in {0, 1, 2} - {absent}:
        assert isinstance(errors[rank], PeerTimeoutError)
        assert f"rank {rank}: arrived: rank {absent} did not get there" in str(errors[rank])
        assert not libraries[rank].initialized()
    assert took < 20


def test_a_rank_stuck_or_failed_in_the_library_is_named_by_the_others() -> None:
    def spoil(rank: int, library: Library) -> bool:
        library.fails = rank == 1
        return True

    _, errors, _ = start(3, spoil)
    assert "rank 1: started failed: no network card" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerTimeoutError)
        assert f"rank {rank}: started: not reached in 1.5 s" in str(errors[rank]) and "rank 1" in str(errors[rank])


def test_a_library_that_somebody_else_started_is_refused_before_anything_is_waited_for() -> None:
    def spoil(rank: int, library: Library) -> bool:
        library.started_by = "somebody"
        return True

    _, errors, took = start(2, spoil)
    assert all("something else in this process has started" in str(error) for error in errors) and took < TIMEOUT_S


def test_a_library_that_counts_otherwise_is_refused() -> None:
    def spoil(rank: int, library: Library) -> bool:
        library.rank = lambda: 1 - rank  # type: ignore[method-assign]
        return True

    _, errors, _ = start(2, spoil)
    assert [str(error) for error in errors] == [f"rank {r}: the library calls this rank PE {1 - r}" for r in (0, 1)]


def test_many_missing_ranks_are_counted() -> None:
    gathering = Gathering(HashStore(), 0, [f"rank {n}" for n in range(100)], 0.1)
    with pytest.raises(PeerTimeoutError, match="rank 8 and 91 more did not get there"):
        gathering.meet("arrived")


def test_two_start_ups_of_one_store_do_not_meet() -> None:
    store = HashStore()
    first, second = (Gathering(PrefixStore(name, store), 0, ["rank 0"], 1.0) for name in ("a", "b"))
    first.reach("arrived")
    assert first.missing("arrived") == [] and second.missing("arrived") == ["rank 0"]
