"""A library whose PEs are processes: arenas are files that every process maps. With it an engine on CPU tensors runs on
``odc.transport: nvshmem``, as far as Python goes; streams and kernels are not there (tests/gpu/test_shmem_engine.py)."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from primus_odc.symmetric.shmem import memory
from tests.symmetric.shmem.fake_library import HostArena, bytes_at, without_gpu

_COME_S = 20.0


class FileArena(HostArena):
    """The ``number``-th arena of PE ``rank``, in ``folder``."""

    def __init__(self, folder: Path, number: int, rank: int, nbytes: int) -> None:
        self._paths = f"{folder}/arena.{number}."
        draft = Path(f"{self._paths}{rank}.draft")
        draft.write_bytes(b"\xee" * nbytes)
        draft.rename(f"{self._paths}{rank}")
        super().__init__(self._map(rank))
        self._maps: dict[int, np.ndarray] = {rank: self.bytes}

    def _map(self, pe: int) -> np.ndarray:
        path, deadline = Path(f"{self._paths}{pe}"), time.monotonic() + _COME_S
        while not path.exists():
            assert time.monotonic() < deadline, f"PE {pe} made no arena"
            time.sleep(0.001)
        return np.memmap(path, np.uint8, "r+")

    def peer_address(self, pe: int) -> int:
        if pe not in self._maps:
            self._maps[pe] = self._map(pe)
        return int(self._maps[pe].ctypes.data)

    def _there(self, pe: int, symmetric: int) -> int:
        return self.peer_address(pe) + symmetric - self.address()

    def release(self) -> None:
        self.released = True


def play_library(patch: pytest.MonkeyPatch, rank: int, folder: Path, made: list[FileArena]) -> None:
    """Let engines of this process, which is ``rank``, use the library as ``nvshmem`` on CPU tensors; the arenas made are noted."""
    numbers = itertools.count()

    def make(nbytes: int) -> FileArena:
        made.append(FileArena(folder, next(numbers), rank, nbytes))
        return made[-1]

    started: list[bool] = []
    module = SimpleNamespace(
        BATCH=4,
        SOURCES=3,
        initialized=lambda: bool(started),
        unique_id=lambda: b"id",
        init=lambda rank, ranks, id: started.append(True),
        rank=lambda: rank,
        load_kernels=lambda code_object: None,
        Arena=make,
        view=lambda address, nbytes, kind, device: torch.from_numpy(bytes_at(address, nbytes)).__dlpack__(),
    )
    without_gpu(patch)
    patch.setattr(memory, "load_extension", lambda name: module)
    patch.setattr("primus_odc.fsdp.preparation.resolve_transport", lambda config, device_type, machines: "nvshmem")
