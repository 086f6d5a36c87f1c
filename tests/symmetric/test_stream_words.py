"""What becomes of pinned memory, with a driver that only keeps books; writing from streams is tested on GPUs."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from primus_odc.errors import OdcError
from primus_odc.symmetric import stream_words
from primus_odc.symmetric.stream_words import StreamWriter

DEVICE = torch.device("cuda", 1)


class Driver:
    """Stands in for the runtime; ``log`` holds ``(call, address)`` in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert nbytes % mmap.PAGESIZE == 0 and flags == 2
        self.log.append(("pin", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert any(line.startswith(f"{address:08x}-") for line in Path("/proc/self/maps").read_text().splitlines()), "unmapped first"
        self.log.append(("unpin", address))
        return self.code

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE
        self.log.append(("wait", 0))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    monkeypatch.setattr(stream_words, "_stream_write_value", lambda: None)
    yield driver
    stream_words._DROPPED.clear()


def page() -> torch.Tensor:
    """Memory that is unmapped with its last reference, as the segment of a heap is."""
    return torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)


def test_a_closed_writer_has_unpinned_its_memory_once(driver: Driver) -> None:
    writer = StreamWriter(page()[:100], DEVICE)
    ((_, address),) = driver.log
    writer.close()
    writer.close()
    del writer
    gc.collect()
    assert driver.log == [("pin", address), ("wait", 0), ("unpin", address)]
    assert stream_words._DROPPED == []


def test_a_dropped_writer_calls_nothing_and_is_unpinned_by_the_next(driver: Driver) -> None:
    memory = page()
    alive, address = weakref.ref(memory), memory.data_ptr()
    cycle: list[object] = [StreamWriter(memory, DEVICE)]
    cycle.append(cycle)
    del memory, cycle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join(20)
    assert driver.log == [("pin", address)] and alive() is not None
    following = StreamWriter(page(), DEVICE)
    assert driver.log == [("pin", address), ("wait", 0), ("unpin", address), ("pin", following._address)]
    gc.collect()
    assert alive() is None
    following.close()


def test_refusals_of_the_driver_are_told(driver: Driver) -> None:
    writer = StreamWriter(page(), DEVICE)
    driver.code = 801
    with pytest.raises(OdcError, match=r"cannot be unpinned \(cudaHostUnregister error 801\)"):
        writer.close()
    with pytest.raises(OdcError, match=r"\(4096 bytes\) cannot be pinned .*error 801\): raise the limit of locked memory"):
        StreamWriter(page(), DEVICE)
    with pytest.raises(ValueError, match="not aligned to a page"):
        StreamWriter(page()[8:], DEVICE)


AT_EXIT = """
import torch
from primus_odc.symmetric import stream_words
from tests.symmetric.test_stream_words import DEVICE, Driver, page
driver = Driver()
torch.cuda.cudart = lambda: driver
stream_words._stream_write_value = lambda: None
writer = stream_words.StreamWriter(page(), DEVICE)
driver.cudaHostUnregister = driver.synchronize = lambda *_: print("called", flush=True)
print("end", flush=True)
"""


def test_the_end_of_the_process_calls_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
