"""What of the settle happens beside backward: in both modes all groups but the last few are delivered before the last backward ends."""

from __future__ import annotations

import pytest
import torch

import primus_odc
from tests.gpu.models import inputs, loss, require_gpus, shard_wide, wide
from tests.workers import run_workers

DEPTH, ROWS = 24, 30000
"""Backward of one of the units takes milliseconds, so that a group has time to travel while others are computed."""


def delivered_early(rank: int, world_size: int, accumulate: str) -> list[tuple[float, int]]:
    """For some minibatches (share of the bytes received that were in complete sums before backward ended, bytes received)."""
    model = shard_wide(wide(depth=DEPTH))
    engine = primus_odc.attach(model, accumulate=accumulate)
    found = []
    for step in range(4):
        engine.begin_minibatch(2)
        deliveries = engine.time_settle()
        for index in range(2):
            loss(model, inputs(step, rank, index, rows=ROWS)).backward()
        computed = torch.cuda.Event(enable_timing=True)
        computed.record()
        engine.settle()
        torch.cuda.synchronize()
        received = sum(size for _, size in deliveries)
        hidden = sum(size for event, size in deliveries if event.elapsed_time(computed) >= 0)
        found.append((hidden / received, received))
        model.zero_grad()
    engine.detach()
    return found[1:]  # the first compiles kernels


@pytest.mark.timeout(150)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
def test_most_of_the_settle_is_hidden_behind_backward(accumulate: str) -> None:
    require_gpus(2, shared=False)
    ranks = run_workers(delivered_early, 2, accumulate, timeout_s=130, gpu=True)
    shares = [share for found in ranks for share, _ in found]
    assert sorted(shares)[len(shares) // 2] >= 0.5, shares
    assert min(size for found in ranks for _, size in found) > 0
