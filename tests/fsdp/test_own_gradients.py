"""Gradients that the script makes or assigns itself, beside those of minibatches: they are added up as PyTorch does, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import primus_odc
from primus_odc.errors import OdcError
from tests.fsdp.checks import Check, failures, relative_error, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, shard, tiny_model
from tests.workers import run_workers

MODES = ({"accumulate": "local", "parameters": "reshard"}, {"accumulate": "owner", "parameters": "resident"})


def _penalty(model: nn.Module) -> None:
    """Through the sharded parameters, no forward of the model."""
    for p in model.parameters():
        (p**2).sum().mul(0.5).backward()


def _compare(model: Tiny, *, steps: int, penalties: int) -> None:
    """The gradients are those of ``steps`` minibatches of one microbatch a rank, and of so many penalties."""
    whole = tiny_model()
    for step in range(steps):
        for r in range(dist.get_world_size()):
            loss_of(whole, *microbatch(step, r, 0), 1).backward()
    for _ in range(penalties):
        _penalty(whole)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert relative_error(full(p.grad), q.grad) <= 1e-6, name


def a_penalty_between_minibatches_counts() -> None:
    for mode in MODES:
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **mode)
        for step in range(2):
            _penalty(model)
            engine.begin_minibatch(1)
            loss_of(model, *microbatch(step, dist.get_rank(), 0), 1).backward()
            engine.settle()
        _penalty(model)
        _compare(model, steps=2, penalties=3)
        engine.detach()


def a_penalty_inside_a_minibatch_is_refused() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model, parameters="reshard")
    engine.begin_minibatch(1)
    loss_of(model, *microbatch(0, dist.get_rank(), 0), 1).backward()
    model.reshard()  # type: ignore[operator]
    _penalty(model)
    dist.barrier()  # the first rank to refuse tells the others, which must have come as far
    with pytest.raises(OdcError, match=r"the gradient of \S+ was assigned inside a minibatch \(or made by a backward"):
        engine.settle()


def _assigned(make: Callable[[Any], torch.Tensor], *parts: str) -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    model.head.weight.grad = make(model.head.weight)
    dist.barrier()
    with pytest.raises(OdcError) as refusal:
        engine.begin_minibatch(0)
    for part in ("the gradient assigned to head.weight", *parts):
        assert part in str(refusal.value)


def an_ordinary_tensor_is_refused() -> None:
    _assigned(lambda p: torch.zeros(p.shape), "is an ordinary tensor and its parameter (Shard(dim=0),)")


def other_placements_are_refused() -> None:
    _assigned(lambda p: DTensor.from_local(torch.zeros(p.shape), p.device_mesh, [Replicate()]), "is (Replicate(),)")


CHECKS: dict[str, Check] = {
    f.__name__: f
    for f in (
        a_penalty_between_minibatches_counts,
        a_penalty_inside_a_minibatch_is_refused,
        an_ordinary_tensor_is_refused,
        other_placements_are_refused,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CHECKS)
def test_own_gradients(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
