"""The engine against a single process in fp64: gradients of every parameter, for any assignment of microbatches to ranks."""

from __future__ import annotations

import torch
from torch import nn

from tests.fsdp.models import check_gradients, tiny_model
from tests.workers import run_workers


def _unequal_counts(rank: int, world_size: int, counts: list[list[int]], options: dict[str, object]) -> float:
    return check_gradients(tiny_model, counts, options)


def test_unequal_counts() -> None:
    counts = [[3, 1], [0, 2], [1, 1], [2, 0]]
    assert max(run_workers(_unequal_counts, 2, counts, {})) <= 1e-6
