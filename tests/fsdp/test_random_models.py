"""Random models, units, meshes, modes, counts and loops, computed in fp64, where a wrong gradient cannot hide behind rounding; parameters
are fp64 or, as where FSDP2 casts them for compute, fp32.

A seed decides everything, on every rank alike: a tree of modules of which some are FSDP2 units, some frozen, some recomputed, some called
twice, some left out of some microbatches; how many microbatches each rank runs; and how the loop announces them.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import primus_odc
from tests.fsdp.models import full
from tests.workers import run_workers

WIDTH = 6
STEPS = 3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
SEEDS = {3: range(100, 108), 4: range(10)}


class _Node(nn.Module):
    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(_Node(rng, depth - 1) for _ in range(rng.randint(0, 3) if depth else 0))
        inner = rng.randint(1, 9)
        self.own: nn.Module = rng.choice(
            [
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH)),
                nn.LayerNorm(WIDTH),
            ]
        )
        self.beside = nn.Parameter(torch.randn(rng.choice((1, 2, 3, 5)), WIDTH) * 0.3) if rng.random() < 0.3 else None
        self.recomputed, self.twice, self.left_out = rng.random() < 0.25, rng.random() < 0.15, rng.randint(1, 4)

    def forward(self, x: torch.Tensor, variant: int) -> torch.Tensor:
        x = x + torch.tanh(self.own(x))
        if self.beside is not None:
            x = x + 0.1 * self.beside.sum(0)
        for child in self.children_:
            assert isinstance(child, _Node)
            if child.left_out == variant:
                continue
            for _ in range(2 if child.twice else 1):
                x = checkpoint(child, x, variant, use_reentrant=False) if child.recomputed else child(x, variant)
        return x


def _model(seed: int) -> _Node:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = _Node(rng, 2).double()
    for p in model.parameters():
        p.requires_grad_(rng.random() < 0.8)
    return model


def _microbatch(seed: int, step: int, rank: int, index: int) -> tuple[torch.Tensor, int]:
    """Input, and the variant: modules with this number are left out (0: none)."""
    key = ((seed * 101 + step) * 101 + rank) * 101 + index
    generator = torch.Generator().manual_seed(key)
    return torch.randn(1 + key % 3, WIDTH, generator=generator, dtype=torch.float64), random.Random(key).randint(0, 4)


def _pass(model: nn.Module, seed: int, step: int, rank: int, index: int) -> None:
    output = model(*_microbatch(seed, step, rank, index))
    if output.requires_grad:
        output.square().sum().backward()


def _shard(model: _Node, rng: random.Random, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64) if dtype != torch.float64 else MixedPrecisionPolicy()
    world = dist.get_world_size()
    shapes = [(world,), (world,), (1, world), (world, 1), *([(2, 2)] if world == 4 else [])]
    shape = rng.choice(shapes)
    mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    reshard: Any = rng.choice([True, False, *([2] if shape[-1] == 4 else [])])
    for node in reversed([m for m in model.modules() if isinstance(m, _Node) and m is not model]):
        if rng.random() < 0.5:
            fully_shard(node, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _check(seed: int) -> None:
    rng, rank = random.Random(seed + 1), dist.get_rank()
    dtype = rng.choice(tuple(TOLERANCES))
    whole, model = _model(seed).to(dtype).double(), _model(seed).to(dtype)
    _shard(model, rng, dtype)
    announce = rng.choice(("count", "last", "nothing"))
    engine = primus_odc.attach(
        model,
        accumulate=rng.choice(("local", "owner")),
        parameters=rng.choice(("reshard", "resident")),
        verify=rng.choice(("off", "off", "checksum", "reference")),
    )
    for step in range(STEPS):
        counts = [rng.randint(0, 3) for _ in range(dist.get_world_size())]
        whole.zero_grad()
        model.zero_grad(set_to_none=rng.random() < 0.5)
        if rng.random() < 0.3:  # an evaluation with as many passes as the rank's number
            engine.publish()
            with torch.no_grad():
                for i in range(rank):
                    model(*_microbatch(seed, STEPS, rank, i))
        engine.begin_minibatch(counts[rank] if announce == "count" else None)
        for i in range(counts[rank]):
            if announce == "last" and i == counts[rank] - 1:
                engine.last_microbatch()
            _pass(model, seed, step, rank, i)
        engine.settle()
        for r, n in enumerate(counts):
            for i in range(n):
                _pass(whole, seed, step, r, i)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in whole.parameters() if p.grad is not None))
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            if not p.requires_grad:
                assert p.grad is None, name
                continue
            assert p.grad is not None, name
            expected = q.grad if q.grad is not None else torch.zeros_like(q)
            error = float((full(p.grad) - expected).norm())
            assert error <= TOLERANCES[dtype] * max(float(expected.norm()), 1e-3 * norm), (name, error)
        assert math.isclose(engine.grad_norm(), norm, rel_tol=TOLERANCES[dtype])
    engine.detach()


def _seeds(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        try:
            _check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", SEEDS)
def test_any_model_has_the_gradients_of_one_process(world_size: int) -> None:
    run_workers(_seeds, world_size, SEEDS[world_size], timeout_s=100)
