"""T17: a random delay at every protocol point, 500 seeds. Right: bit-identical in deterministic mode.

The delays go in front of every effect of the protocol (wait, data movement, word), so every interleaving of ranks is within reach; all
seeds run inside one set of processes, three minibatches each, and each must give the very bits of the run without delays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import primus_odc
import primus_odc.fsdp.engine as engine_module
from primus_odc.primitives import driver
from primus_odc.primitives.effects import Effect
from primus_odc.symmetric.heap import SymmetricHeap
from tests.fsdp.models import Tiny, loss_of, microbatch, rows, shard
from tests.workers import run_workers

SEEDS = 500
COUNTS = [[2, 0, 0], [0, 1, 1], [1, 0, 1]]


def _delayed(generator: random.Random) -> object:
    def run(heap: SymmetricHeap, steps: Iterable[Effect]) -> None:
        def slowly() -> Iterable[Effect]:
            for effect in steps:
                if generator.random() < 0.1:
                    time.sleep(generator.random() * 2e-4)
                yield effect

        driver.run(heap, slowly())

    return run


def _seeds(rank: int, world_size: int, seeds: int, options: dict[str, Any]) -> list[int]:
    torch.manual_seed(0)
    model = shard(Tiny(width=5, depth=1))
    start = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    engine = primus_odc.attach(model, deterministic=True, parameters="reshard", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> list[torch.Tensor]:
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.to_local().copy_(s)  # type: ignore[attr-defined]
        engine.publish()
        for step, counts in enumerate(COUNTS):
            engine.begin_minibatch(counts[rank])
            for i in range(counts[rank]):
                x, y = microbatch(step, rank, i)
                loss_of(model, x, y, rows(step, counts)).backward()
            engine.settle()
            optimizer.step()
            optimizer.zero_grad()
        engine.publish()
        return [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]

    expected = train()
    assert not all(torch.equal(e, s) for e, s in zip(expected, start, strict=True))
    wrong = []
    for seed in range(seeds):
        with mock.patch.object(engine_module, "run", _delayed(random.Random(1000 * seed + rank))):
            if not all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True)):
                wrong.append(seed)
    dist.barrier()
    return wrong


@pytest.mark.timeout(200)
def test_bit_identical_under_random_delays() -> None:
    assert run_workers(_seeds, 3, SEEDS, {}, timeout_s=190) == [[], [], []]


@pytest.mark.timeout(100)
def test_bit_identical_under_random_delays_across_nodes() -> None:
    assert run_workers(_seeds, 3, 100, {"ranks_per_node": 2}, timeout_s=90) == [[], [], []]
