"""HSDP models between two engines, and after the last: FSDP2 keeps nothing of ours that could stop it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import primus_odc
from tests.fsdp.checks import failures, relative_error, run_checks
from tests.fsdp.models import full
from tests.workers import run_workers

MODES: tuple[dict[str, Any], ...] = ({"accumulate": "local"}, {"accumulate": "owner"}, {"parameters": "resident"})


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, with_c: bool) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        y: torch.Tensor = self.b(h) + self.c(h) if with_c else self.b(h)
        return y


def _sharded(**options: Any) -> tuple[nn.Module, nn.Module]:
    """``(whole, sharded)``, equal."""
    model = _Branches()
    whole = copy.deepcopy(model).double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.a, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return whole, model


def _loss(model: nn.Module, rank: int, with_c: bool) -> torch.Tensor:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    loss: torch.Tensor = model(x.to(next(model.parameters()).dtype), with_c).double().square().sum()
    return loss


def _require_gradients(model: nn.Module, whole: nn.Module, ranks: float, with_c: bool, tolerance: float = 1e-6) -> None:
    """Those of ``model`` are the sum over all ranks divided by ``ranks``; both are zeroed."""
    for rank in range(dist.get_world_size()):
        (_loss(whole, rank, with_c) / ranks).backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None and relative_error(full(p.grad), q.grad) <= tolerance, name
    whole.zero_grad()
    model.zero_grad()


def _on_demand(model: nn.Module, options: dict[str, Any], with_c: bool) -> primus_odc.Engine:
    engine = primus_odc.attach(model, **options)
    for _ in range(2):  # FSDP2 adds partial sums of both
        engine.begin_minibatch(1)
        _loss(model, dist.get_rank(), with_c).backward()
        engine.settle()
        model.zero_grad()
    engine.begin_minibatch(1)
    _loss(model, dist.get_rank(), with_c).backward()
    engine.settle()
    return engine


def a_detached_model_has_the_mean_of_all_ranks() -> None:
    for options in MODES:
        for used in (True, False):
            whole, model = _sharded()
            engine = _on_demand(model, options, with_c=True)
            _require_gradients(model, whole, 1.0, with_c=True)
            engine.detach()
            for _ in range(2):
                _loss(model, dist.get_rank(), used).backward()
                _require_gradients(model, whole, dist.get_world_size(), used)


def also_reduced_in_another_dtype() -> None:
    for reduce_dtype in (torch.bfloat16, torch.float16, torch.float64):
        whole, model = _sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        engine = _on_demand(model, {}, with_c=True)
        _require_gradients(model, whole, 1.0, with_c=True, tolerance=0.01)
        engine.detach()
        _loss(model, dist.get_rank(), False).backward()
        _require_gradients(model, whole, dist.get_world_size(), False, tolerance=0.01)


def parameters_may_be_frozen_between_two_engines() -> None:
    for options in MODES:
        whole, model = _sharded()
        for frozen in (False, True, False):
            for m in (whole, model):
                m.c.requires_grad_(not frozen)
            engine = _on_demand(model, options, with_c=True)
            _require_gradients(model, whole, 1.0, with_c=True)
            engine.detach()


CHECKS = {
    f.__name__: f
    for f in (a_detached_model_has_the_mean_of_all_ranks, also_reduced_in_another_dtype, parameters_may_be_frozen_between_two_engines)
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 4, CHECKS, timeout_s=80)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", CHECKS)
def test_hsdp(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
