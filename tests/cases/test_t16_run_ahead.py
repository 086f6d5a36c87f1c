"""T16: a fast rank starts minibatch k+1 while a slow one still reads or pushes k.

Naive code lets the fast rank overwrite parameters or buffers in use. Right: epochs keep the minibatches apart. Sleeps are injected before
every read of a shard, every pull and every push of the slow rank, and before its own publications, in turn.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from primus_odc.primitives.plane import ArenaPlane
from tests.fsdp.models import check_gradients, tiny_model
from tests.workers import run_workers

OPERATIONS = ("read_shard", "pull", "push", "add_arrival", "publish_shard", "accumulate", "complete", "deliver")
SLOW = (1,)
COUNTS = [[2, 1, 0], [1, 0, 1], [0, 2, 2]]


def _with_slow_rank(rank: int, world_size: int) -> dict[str, float]:
    errors = {}
    for slow in SLOW:
        for operation in OPERATIONS:
            original = getattr(ArenaPlane, operation)

            def slowly(self: ArenaPlane, *args: Any, _original: Any = original, _slow: bool = rank == slow) -> None:
                if _slow:
                    time.sleep(0.004)
                _original(self, *args)
                if _slow:
                    time.sleep(0.001)

            for mode in ("local", "owner"):
                with mock.patch.object(ArenaPlane, operation, slowly):
                    errors[f"rank {slow} slow in {operation}, {mode}"] = check_gradients(tiny_model, COUNTS, {"accumulate": mode})
    return errors


@pytest.mark.timeout(120)
def test_epochs_keep_minibatches_apart() -> None:
    for errors in run_workers(_with_slow_rank, 3, timeout_s=110):
        assert len(errors) == 2 * len(SLOW) * len(OPERATIONS)
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}
