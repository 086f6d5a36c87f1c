"""The kernels of csrc/ over NVSHMEM or MORI on GPUs of one host, each against plain torch or numpy (tests/gpu/shmem_ranks.py).

They need the native module: ``bash scripts/test_shmem.sh`` builds it in the checkout, runs these, the same under compute-sanitizer and the
comparison with NCCL. Each case runs twice: with the peers' memory mapped, and with every rank as a node of its own, so that data go through
the library's calls, as they do between nodes. The network itself is not there: one host has none between its GPUs. With ``SHARE_GPUS=1``
a GPU serves several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import shmem_ranks
from tests.gpu.models import SHMEM, require_shmem
from tests.workers import run_workers

MIB = shmem_ranks.MIB
SMALL = [1, 2, 3, 7, 8, 15, 16, 17, 31, 255, 256, 257, 4095, 4096, 4097]
LARGE = [65521, MIB - 1, MIB, MIB + 1, 16 * MIB + 5, 64 * MIB, 256 * MIB - 13, 256 * MIB]
SHIFTS = [(0, 0), (1, 0), (0, 2), (4, 0), (7, 7), (8, 5)]
"""(where data arrive, where they come from), bytes from an aligned address: every width of copies."""
LAYOUTS = ["mapped", "network"]
WORLDS = [2, 4]


def run(function: Any, world_size: int, folder: Path, *args: Any, timeout_s: float = 220) -> None:
    require_shmem(world_size)
    assert run_workers(function, world_size, str(folder), *args, timeout_s=timeout_s, gpu=True) == [[]] * world_size


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_transfers(layout: str, world_size: int, tmp_path: Path) -> None:
    run(shmem_ranks.transfers, world_size, tmp_path, layout, SMALL, SHIFTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_transfers(layout: str, world_size: int, tmp_path: Path) -> None:
    run(shmem_ranks.transfers, world_size, tmp_path, layout, LARGE, [(0, 0), (3, 1)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfers_past_one_work_request_and_32_bits(layout: str, tmp_path: Path) -> None:
    run(shmem_ranks.transfers, 2, tmp_path, layout, [(1 << 32) + 13], [(0, 0)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
def test_sums(world_size: int, tmp_path: Path) -> None:
    run(shmem_ranks.sums, world_size, tmp_path, [1, 2, 3, 4, 5, 1023, 4096, 4099, 65 * 4096 + 5, 4 * MIB + 1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_sequences(layout: str, world_size: int, tmp_path: Path) -> None:
    run(shmem_ranks.sequence, world_size, tmp_path, layout, 11, 1000)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_little_of_each(layout: str, tmp_path: Path) -> None:
    """What runs under compute-sanitizer, where a kernel is many times slower and the library takes half a minute to start."""
    run(shmem_ranks.a_little_of_each, 2, tmp_path, layout)


@pytest.mark.timeout(300)
def test_failures_are_told_and_nothing_follows(tmp_path: Path) -> None:
    run(shmem_ranks.failures, 2, tmp_path)


def test_the_module_tells_its_library() -> None:
    require_shmem(1)
    from primus_odc.symmetric.shmem.extension import load_extension

    assert torch.cuda.is_available()
    module = load_extension(SHMEM)
    assert not module.initialized() and module.built_version()[0].isdigit()
