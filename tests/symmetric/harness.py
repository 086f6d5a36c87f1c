"""Ranks for tests: threads of this process where memory is all that matters, real processes where one must be stopped or killed.

Processes come from a fork server that has torch imported already, so that a rank costs a fork and not an import.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from primus_odc.symmetric.arena import ArenaPlan
from primus_odc.symmetric.heap import SymmetricHeap
from tests.workers import FORK_SERVER

JOIN_S = 20.0
"""Hard limit of every wait of a test for its ranks."""


def make_heap(
    rank: int,
    world_size: int,
    exchange: Callable[[Any], list[Any]],
    *,
    regions: Mapping[str, int] | None = None,
    words: Mapping[str, int] | None = None,
    timeout_s: float = 10.0,
) -> SymmetricHeap:
    """A heap with a region ``data`` of 4 KiB and words ``step``, ``tick`` unless told otherwise."""
    plan = ArenaPlan()
    for name, nbytes in (regions or {"data": 4096}).items():
        plan.add(name, nbytes)
    names = [f"rank {r}" for r in range(world_size)]
    return SymmetricHeap(rank, names, plan, {"step": 1, "tick": 3} if words is None else words, exchange, timeout_s)


class ThreadExchange:
    """All-gather between threads; make one, hand ``of(rank)`` to each thread."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self._slots[rank] = value
            self._barrier.wait(JOIN_S)
            values = list(self._slots)
            self._barrier.wait(JOIN_S)
            return values

        return exchange


def in_threads(world_size: int, rank_main: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Run ``rank_main(rank, exchange)`` in one thread per rank; what each returned, or the exception that ended it."""
    exchange = ThreadExchange(world_size)
    results: list[Any] = [TimeoutError("the rank's thread did not end")] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = rank_main(rank, exchange.of(rank))
        except Exception as error:  # noqa: BLE001  # the test inspects it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return results


def all_good(results: list[Any]) -> list[Any]:
    """``results``, or the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class FileExchange:
    """All-gather between processes through files that are renamed into place."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self._directory, self._rank, self._world_size, self._round = directory, rank, world_size, 0

    def __call__(self, value: Any) -> list[Any]:
        self._round += 1
        draft = self._directory / f"draft.{self._rank}"
        draft.write_bytes(pickle.dumps(value))
        draft.rename(self._path(self._rank))
        deadline = time.monotonic() + JOIN_S
        while not all(self._path(r).exists() for r in range(self._world_size)):
            if time.monotonic() > deadline:
                raise TimeoutError("not every rank of the test came to the exchange")
            time.sleep(0.002)
        return [pickle.loads(self._path(r).read_bytes()) for r in range(self._world_size)]

    def _path(self, rank: int) -> Path:
        return self._directory / f"round.{self._round}.{rank}"


class Ranks:
    """Real processes, one per rank, each running ``main(rank, exchange, pipe, *args)``; ended, stopped ones too, on leaving the block."""

    def __init__(self, world_size: int, directory: Path, main: Callable[..., Any], *args: Any) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = FORK_SERVER.Pipe()
            process = FORK_SERVER.Process(target=_entry, args=(rank, world_size, directory, theirs, main, args), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self.processes)):
            self.kill(rank)

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int) -> None:
        if self.processes[rank].is_alive():
            os.kill(self.pid(rank), signal.SIGKILL)
        self.processes[rank].join(JOIN_S)

    def tell(self, message: Any, *ranks: int) -> None:
        for rank in ranks or range(len(self.pipes)):
            self.pipes[rank].send(message)

    def hear(self, *ranks: int) -> list[Any]:
        """The next message of each rank; an exception that ended a rank arrives as ``(type name, text)``."""
        return [self._next(rank) for rank in ranks or range(len(self.pipes))]

    def _next(self, rank: int) -> Any:
        if not self.pipes[rank].poll(JOIN_S):
            raise TimeoutError(f"rank {rank} of the test said nothing in {JOIN_S} s")
        return self.pipes[rank].recv()

    def expect(self, message: Any, *ranks: int) -> None:
        heard = self.hear(*ranks)
        if heard != [message] * len(heard):
            raise AssertionError(f"expected {message!r} of every rank, heard {heard}")


def _entry(rank: int, world_size: int, directory: Path, pipe: Connection, main: Callable[..., Any], args: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(main(rank, FileExchange(directory, rank, world_size), pipe, *args))
    except Exception as error:  # noqa: BLE001  # told to the test
        pipe.send((type(error).__name__, str(error)))
    # The end of this process would be one more death for the others to report: it lives until the test has heard all of them.
    pipe.poll(JOIN_S)
