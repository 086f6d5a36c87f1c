"""A backward pass that fails and is caught by the script ends all ranks at once, wherever in a model autograd had got to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import register_dataclass

import primus_odc
from primus_odc.errors import OdcError, PeerError
from primus_odc.fsdp.engine import Engine
from tests.fsdp.checks import failures, run_checks
from tests.fsdp.models import Tiny, microbatch, shard, tiny_model
from tests.workers import run_workers

INSIDE = "an exception was raised inside the backward pass of microbatch 1"


def _break(*_: object) -> None:
    raise ValueError("broken on purpose")


def _ends_both(engine: Engine, fails: Callable[[], None], works: Callable[[], None]) -> None:
    """Rank 1 catches its failure and calls nothing more; rank 0 is told in settle."""
    engine.begin_minibatch(1)
    if dist.get_rank() == 0:
        works()
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="broken on purpose"):
            fails()
    else:
        with pytest.raises(PeerError, match=f"rank 1 aborted.*{INSIDE}"):
            engine.settle()
    dist.barrier()
    assert time.monotonic() - start < 30  # far from 3 x timeout_s
    if dist.get_rank() == 1:
        with pytest.raises(OdcError, match=INSIDE):
            engine.settle()


def in_a_chunked_head() -> None:
    """The head's backward runs before that of the root's output, and outside it."""
    model = tiny_model()
    fully_shard(model.head)
    shard(model)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        x = model.embed(x)
        for block in model.blocks:
            x = block(x)
        return x

    model.forward = hidden  # type: ignore[method-assign]
    engine = primus_odc.attach(model, timeout_s=60)

    def train(*, fail: bool) -> None:
        x, y = microbatch(0, dist.get_rank(), 0)
        out = model(x)
        leaf = out.detach().requires_grad_()
        logits = model.head(leaf)
        if fail:
            leaf.register_hook(_break)
        F.mse_loss(logits, y, reduction="sum").backward()
        out.backward(leaf.grad)

    _ends_both(engine, lambda: train(fail=True), lambda: train(fail=False))


@dataclass
class Output:
    logits: torch.Tensor


register_dataclass(Output)


class _Dataclass(nn.Module):
    """A root that owns no parameter and returns a dataclass."""

    def __init__(self, inner: Tiny) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.inner(x))


def where_the_output_is_a_dataclass() -> None:
    root = _Dataclass(shard(tiny_model()))
    fully_shard(root)
    engine = primus_odc.attach(root, timeout_s=60)

    def train() -> None:
        x, y = microbatch(0, dist.get_rank(), 0)
        F.mse_loss(root(x).logits, y, reduction="sum").backward()

    def fail() -> None:
        root.inner.blocks[1].register_full_backward_pre_hook(_break)
        train()

    _ends_both(engine, fail, train)


CHECKS = {f.__name__: f for f in (in_a_chunked_head, where_the_output_is_a_dataclass)}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=90)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", CHECKS)
def test_all_ranks_end(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
