"""``accumulate: owner``: sums are delivered as soon as they are complete, from within the last backward."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import primus_odc
from primus_odc.fsdp.engine import Engine
from tests.fsdp.models import loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [2, 3]


def _until_the_other_has_pushed_everything(engine: Engine) -> None:
    heap, epoch = engine._heap, engine._protocol.epoch
    deadline = time.monotonic() + 30
    while any(heap.words.read(0, "ready", g) < 2 * epoch for g in range(4)) or (
        heap.words.read(1, "tail", 0) < heap.words.read(0, "head", 1)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def delivered_before_settle(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """For some minibatches how many groups of rank 1, which ends last, were delivered before settle; and the largest error."""
    model = shard(tiny_model())
    engine = primus_odc.attach(model, accumulate="owner", **options)
    found, errors = [], []
    for step in range(3):
        engine.begin_minibatch(COUNTS[rank])
        deliveries = engine.time_settle()
        for index in range(COUNTS[rank]):
            if rank == 1 and index == COUNTS[1] - 1:
                _until_the_other_has_pushed_everything(engine)
            x, y = microbatch(step, rank, index)
            loss_of(model, x, y, rows(step, COUNTS)).backward()
        found.append(len(deliveries))
        engine.settle()
        assert len(deliveries) == 4  # each of them once
        errors.append(worst_relative_error(model, reference_gradients(tiny_model(), step, COUNTS)))
        model.zero_grad()
        dist.barrier()
    engine.detach()
    return found, errors


@pytest.mark.parametrize(
    ("options", "early"),
    [({"parameters": "reshard"}, 3), ({"parameters": "resident"}, 3), ({"verify": "checksum"}, 0), ({"verify": "reference"}, 0)],
)
def test_all_groups_but_the_root_are_delivered_within_backward(options: dict[str, Any], early: int) -> None:
    """Of what the last rank's backward has not reached yet nothing can be; what is verified is looked at in settle."""
    (_, errors_0), (found, errors_1) = run_workers(delivered_before_settle, 2, options, timeout_s=50)
    assert found == [early] * 3
    assert max(*errors_0, *errors_1) <= 1e-6


def zeroed_between_backward_and_settle(rank: int, world_size: int, accumulate: str, set_to_none: bool) -> tuple[list[int], list[float]]:
    """Gradients that can be seen before settle on the rank that ends last, and the errors behind it."""
    model = shard(tiny_model())
    engine = primus_odc.attach(model, accumulate=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen, errors = [], []
    for step in range(4):
        engine.begin_minibatch(COUNTS[rank])
        for index in range(COUNTS[rank]):
            if rank == 1 and index == COUNTS[1] - 1 and accumulate == "owner":
                _until_the_other_has_pushed_everything(engine)
            x, y = microbatch(step, rank, index)
            loss_of(model, x, y, rows(step, COUNTS)).backward()
        seen.append(sum(bool(p.grad.to_local().any()) for p in model.parameters() if p.grad is not None))  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none)
        engine.settle()
        errors.append(worst_relative_error(model, reference_gradients(tiny_model(), step, COUNTS)))
        optimizer.zero_grad(set_to_none)
        dist.barrier()
    engine.detach()
    return seen, errors


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", ["owner", "local"])
def test_zeroing_before_settle_drops_nothing_of_this_minibatch(accumulate: str, set_to_none: bool) -> None:
    for seen, errors in run_workers(zeroed_between_backward_and_settle, 2, accumulate, set_to_none, timeout_s=50):
        assert seen == [0] * 4
        assert max(errors) <= 1e-6
