from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_odc.errors import PeerTimeoutError
from primus_odc.primitives.driver import ProgressThread, run
from primus_odc.primitives.effects import Do, Send, Store, Wait
from primus_odc.primitives.lanes import Lanes

ROOT = Path(__file__).resolve().parents[2]


class RecordingHeap:
    """Notes what a heap would be asked to do."""

    rank, world_size, timeout_s, device = 0, 2, 5.0, torch.device("cpu")
    names = ("rank 0", "rank 1")
    sending = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.words = self

    def wait(self, *what: Any) -> None:
        self.log.append(("wait", *what))

    def store(self, *what: Any) -> None:
        self.log.append(("store", *what))

    def signal(self, *what: Any) -> None:
        self.log.append(("signal", *what))

    def read(self, *what: Any) -> int:
        return 0

    def abort(self, message: str) -> None:
        self.log.append(("abort", message))


class TwoPeers:
    peers = (0, 1)


class FailingProtocol:
    t = TwoPeers

    def serve(self, read_word: Any, source: int) -> list[Any]:
        raise ArithmeticError(f"cannot serve {source}")


def test_effects_run_in_order() -> None:
    heap = RecordingHeap()
    run(
        heap,  # type: ignore[arg-type]
        [
            Store("a", 2, 7),
            Do(lambda: heap.log.append("moved")),
            Wait(1, "b", 0, 3, "gather"),
            Send(3, "c", 4, 9, lambda: heap.log.append("put")),
            Wait(3, "d", 1, 9, "settle", home=0),
            Send(3, "c", 5, 9),
        ],
    )
    assert heap.log == [
        ("store", "a", 7, 2),
        "moved",
        ("wait", 1, "b", 0, 3, "gather", None, None),
        "put",
        ("signal", 3, "c", 9, 4),
        ("wait", 3, "d", 1, 9, "settle", 0, None),
        ("signal", 3, "c", 9, 5),
    ]


def test_an_error_of_the_progress_thread_aborts_the_heap_and_is_raised_by_check() -> None:
    heap = RecordingHeap()
    progress = ProgressThread(heap, FailingProtocol(), Lanes(torch.device("cpu"), 2, True))  # type: ignore[arg-type]
    progress._thread.join(10)
    progress.stop()
    assert heap.log == [("abort", "cannot serve 1")]
    with pytest.raises(ArithmeticError, match="cannot serve 1"):
        progress.check()


def test_a_progress_thread_that_does_not_end_is_told() -> None:
    heap, entered, released = RecordingHeap(), threading.Event(), threading.Event()
    heap.timeout_s = 0.2

    class Stuck(FailingProtocol):
        def serve(self, read: Any, source: int) -> Any:
            entered.set()
            released.wait(30)
            return iter(())

    progress = ProgressThread(heap, Stuck(), Lanes(torch.device("cpu"), 2, True))  # type: ignore[arg-type]
    assert entered.wait(10)
    with pytest.raises(PeerTimeoutError, match=r"rank 0: the thread that adds arrivals did not end in 0\.2 s"):
        progress.stop()
    released.set()
    progress._thread.join(10)


EXIT_IN_THE_MIDDLE = """
import time
import torch
from primus_odc.primitives.driver import ProgressThread
from primus_odc.primitives.lanes import Lanes
from primus_odc.primitives.effects import Do
from tests.primitives.test_driver import RecordingHeap, TwoPeers

accumulator = torch.zeros(1 << 22)

class BusyProtocol:
    t = TwoPeers

    def serve(self, read_word, source):
        for _ in range(20):
            yield Do(lambda: accumulator.add_(1.0))

torch.set_num_threads(1)
progress = ProgressThread(RecordingHeap(), BusyProtocol(), Lanes(torch.device("cpu"), 2, True))
while not accumulator[0]:
    time.sleep(0.001)
raise SystemExit(3)
"""


def test_a_rank_that_ends_in_the_middle_of_a_minibatch_keeps_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT_IN_THE_MIDDLE], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, "")
