"""T16: a fast rank starts minibatch k+1 while a slow one still reads or pushes k.

Naive code lets the fast rank overwrite parameters or buffers in use. Right: epochs keep the minibatches apart. Sleeps are injected before
every read of a shard, every pull and every push of the slow rank, and before its own publications, in turn.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from primus_odc.primitives.node_plane import TwoLevelPlane
from primus_odc.primitives.plane import ArenaPlane
from tests.fsdp.models import check_gradients, tiny_model
from tests.workers import run_workers

OPERATIONS = {
    "local": ("publish_shard", "read_shard", "accumulate", "complete", "pull", "deliver"),
    "owner": ("publish_shard", "read_shard", "push", "add_arrival", "complete", "pull", "deliver"),
    "nodes": ("land_shard", "read_shard", "complete", "add_in_node", "complete_partial", "send_partial", "pull", "deliver"),
}
"""``nodes``: ranks 0 and 1 in one, rank 2 in another."""
SLOW = {"local": 1, "owner": 1, "nodes": 2}
COUNTS = [[2, 1, 0], [1, 0, 1], [0, 2, 2]]


def _with_slow_rank(rank: int, world_size: int) -> dict[str, float]:
    errors = {}
    for mode, operations in OPERATIONS.items():
        options, plane = ({"ranks_per_node": 2}, TwoLevelPlane) if mode == "nodes" else ({"accumulate": mode}, ArenaPlane)
        for operation in operations:
            original = getattr(plane, operation)
            calls: list[Any] = []

            def slowly(self: ArenaPlane, *args: Any, _original: Any = original, _calls: list[Any] = calls) -> None:
                time.sleep(0.004)
                _original(self, *args)
                time.sleep(0.001)
                _calls.append(args)

            with mock.patch.object(plane, operation, slowly if rank == SLOW[mode] else original):
                errors[f"slow in {operation}, {mode}"] = check_gradients(tiny_model, COUNTS, options)
            assert rank != SLOW[mode] or len(calls) >= len(COUNTS), f"{operation} is nothing that {mode} does"
    return errors


@pytest.mark.timeout(120)
def test_epochs_keep_minibatches_apart() -> None:
    for errors in run_workers(_with_slow_rank, 3, timeout_s=110):
        assert len(errors) == sum(len(operations) for operations in OPERATIONS.values())
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}
