"""The workers of the tests themselves."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.workers import run_workers


def _gloo_threads(rank: int, world_size: int) -> list[int]:
    """How many threads run collectives, with one group and with two."""
    counts = []
    for make_group in (lambda: dist.group.WORLD, lambda: dist.new_group([0, 1])):
        dist.barrier(make_group())  # a thread gives itself its name before its first collective
        names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
        counts.append(names.count("pt_gloo_runloop"))
    return counts


def test_each_gloo_group_of_a_worker_has_one_thread() -> None:
    assert run_workers(_gloo_threads, 2) == [[1, 2]] * 2
