"""Cases from the field on GPUs: T16 (run-ahead), T17 (random delays), T18 (a killed rank), T31 (large shards, a delayed reader)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import primus_odc
import primus_odc.fsdp.engine as engine_module
from primus_odc.fsdp.engine import Engine
from primus_odc.primitives import driver
from primus_odc.primitives.effects import Effect
from primus_odc.symmetric.heap import SymmetricHeap
from tests.gpu.models import inputs, loss, reference, require_gpus, shard_wide, whole, wide, worst_error
from tests.workers import WorkerFailedError, run_workers

MS = 2_000_000
"""Cycles of a device in about a millisecond."""
COUNTS = [[3, 0, 1, 0], [0, 2, 0, 0], [1, 2, 3, 1], [2, 1, 0, 2], [4, 1, 1, 0], [1, 1, 1, 1]]
"""Microbatches of each of four ranks; two take the first columns."""


def lanes_of(engine: Engine) -> list[Any]:
    """Every stream that moves data, the current one last."""
    lanes = engine._plane.lanes
    streams = [lanes.settle, lanes.sends, *lanes._gathers]
    if engine.choices.accumulate == "owner":
        streams += [lanes.arrivals, *lanes._pushes]
    return [*streams, torch.cuda.current_stream()]


def sleep_on(stream: Any, ms: float) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(ms * MS))


def runs_ahead(rank: int, world_size: int, options: dict[str, Any]) -> list[float]:
    """T16: devices and hosts that fall behind at random, each on streams of its own; AdamW moves the weights in between."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, double = shard_wide(wide()), wide(dtype=torch.float64)
    engine = primus_odc.attach(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # 1e-3 comes near the minimum, see loss
    chance = random.Random(rank)
    errors = []
    for step, row in enumerate(4 * COUNTS):
        counts = row[:world_size]
        double.load_state_dict({k: whole(v).double() for k, v in model.state_dict().items()})
        engine.begin_minibatch(counts[rank])
        for index in range(counts[rank]):
            for stream in lanes_of(engine):
                if chance.random() < 0.2:
                    sleep_on(stream, 20 * chance.random())
            time.sleep(0.01 * chance.random() if chance.random() < 0.3 else 0.0)
            loss(model, inputs(step, rank, index)).backward()
        engine.settle()
        errors.append(worst_error(model, reference(double, step, counts)))
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    return errors


@pytest.mark.timeout(180)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
@pytest.mark.parametrize("parameters", ["reshard", "resident"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_t16_a_rank_that_runs_ahead_meets_no_older_or_newer_data(accumulate: str, parameters: str, world_size: int) -> None:
    require_gpus(world_size)
    options = {"accumulate": accumulate, "parameters": parameters}
    for errors in run_workers(runs_ahead, world_size, options, timeout_s=160, gpu=True):
        assert max(errors) <= 1e-6, errors


def delayed(generator: random.Random, engine: Engine) -> object:
    """The driver with a delay of host or device in front of every tenth effect."""

    def run(heap: SymmetricHeap, steps: Iterable[Effect]) -> None:
        def slowly() -> Iterable[Effect]:
            for effect in steps:
                if generator.random() < 0.05:
                    time.sleep(generator.random() * 2e-3)
                if generator.random() < 0.05:
                    sleep_on(generator.choice(lanes_of(engine)), generator.random())
                yield effect

        driver.run(heap, slowly())

    return run


def same_bits(rank: int, world_size: int, seeds: int) -> list[int]:
    """T17: seeds whose weights after three minibatches are not those of the run without delays."""
    torch.use_deterministic_algorithms(True)
    model = shard_wide(wide(depth=3))
    start = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    engine = primus_odc.attach(model, deterministic=True, parameters="reshard")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> list[torch.Tensor]:
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.to_local().copy_(s)  # type: ignore[attr-defined]
        engine.publish()
        for step, counts in enumerate(COUNTS[:3]):
            engine.begin_minibatch(counts[rank])
            for index in range(counts[rank]):
                loss(model, inputs(step, rank, index)).backward()
            engine.settle()
            optimizer.step()
            optimizer.zero_grad()
        engine.publish()
        return [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]

    expected = train()
    wrong = []
    for seed in range(seeds):
        with mock.patch.object(engine_module, "run", delayed(random.Random(1000 * seed + rank), engine)):
            if not all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True)):
                wrong.append(seed)
    dist.barrier()
    engine.detach()
    return wrong


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world_size", "seeds"), [(2, 150), (4, 50)])
def test_t17_random_delays_change_no_bit(world_size: int, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    require_gpus(world_size)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert run_workers(same_bits, world_size, seeds, timeout_s=220, gpu=True) == [[]] * world_size


def dies(rank: int, world_size: int, where: str) -> str:
    """T18: rank 1 is killed at a place of the minibatch; what rank 0 says of it."""
    model = shard_wide(wide())
    engine = primus_odc.attach(model, accumulate="owner" if where == "push" else "local", timeout_s=20)

    def end_here(at: str) -> None:
        if rank == 1 and where == at and engine.stats()["epoch"] == 3:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(4):
        engine.begin_minibatch(2)
        end_here("gather")
        for index in range(2):
            loss(model, inputs(step, rank, index)).backward()
            end_here("push")
        engine.settle()
        model.zero_grad()
        end_here("publish")
    return "ended"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["gather", "push", "publish"])
def test_t18_a_killed_rank_is_named_with_what_was_waited_for(where: str) -> None:
    require_gpus(2)
    with pytest.raises(WorkerFailedError) as failed:
        run_workers(dies, 2, where, timeout_s=100, gpu=True)
    assert failed.value.codes[1] == -signal.SIGKILL
    said = failed.value.tracebacks[0]
    assert "rank 1 died (its process ended without a goodbye)" in said
    assert "group" in said and "epoch" in said


ROWS, COLUMNS = 16384, 8192


class Large(nn.Module):
    """Two matrices of 512 MiB of fp32: on two ranks shards of 256 MiB. Small whole numbers everywhere, so that every sum is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, ROWS, bias=False, device="cuda")
        self.second = nn.Linear(ROWS, COLUMNS, bias=False, device="cuda")
        with torch.no_grad():
            for number, layer in enumerate((self.first, self.second), 1):
                layer.weight.copy_(torch.arange(layer.weight.numel(), device="cuda").view_as(layer.weight) % (2 + number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def large_shards(rank: int, world_size: int, accumulate: str) -> list[str]:
    """T31: what differs from one process, with a stream asleep in front of everything that reads or is read."""
    torch.backends.cuda.matmul.allow_tf32 = False
    whole_model, model = Large(), Large()
    mesh = init_device_mesh("cuda", (world_size,))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = primus_odc.attach(model, accumulate=accumulate, parameters="reshard")
    wrong = []
    for step in range(4):
        for reader in lanes_of(engine):
            sleep_on(reader, 60 if (rank + step) % 2 else 0)
        engine.begin_minibatch(2)
        x = torch.zeros(3, COLUMNS, device="cuda")
        for index in range(2):
            x[:, (7 * step + index) :: 4096] = 1.0 + rank
            y = model(x)
            if not torch.equal(y, whole_model(x)):
                wrong.append(f"step {step}: forward")
            sleep_on(engine._plane.lanes.settle, 40)
            y.sum().backward()
            for other in range(world_size):
                z = torch.zeros(3, COLUMNS, device="cuda")
                for earlier in range(index + 1):
                    z[:, (7 * step + earlier) :: 4096] = 1.0 + other
                whole_model(z).sum().backward()
        engine.settle()
        for (name, p), sharded in zip(whole_model.named_parameters(), model.parameters(), strict=True):
            assert p.grad is not None and sharded.grad is not None
            if not torch.equal(whole(sharded.grad), p.grad):
                wrong.append(f"step {step}: gradient of {name}")
        with torch.no_grad():
            for m in (model, whole_model):
                for p in m.parameters():
                    p.add_(1.0)  # another epoch's shards are other numbers everywhere
        model.zero_grad()
        whole_model.zero_grad()
        engine.publish()
    engine.detach()
    return wrong


@pytest.mark.timeout(180)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_t31_large_shards_with_a_delayed_reader(accumulate: str, world_size: int) -> None:
    require_gpus(world_size)
    for wrong in run_workers(large_shards, world_size, accumulate, timeout_s=160, gpu=True):
        assert wrong == []
