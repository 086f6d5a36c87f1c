"""A forward that raises, and a script that catches it: nothing of it is in the sums, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import primus_odc
from primus_odc.errors import OdcError
from tests.fsdp.checks import failures, run_checks
from tests.fsdp.models import Tiny, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers


def _fail_in(module: nn.Module, model: Tiny, x: torch.Tensor) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken on purpose")

    handle = module.register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="broken on purpose"):
        model(x)
    handle.remove()


def _train(announced: int | None, order: Sequence[str], counts: list[int], **options: object) -> None:
    """Three minibatches; rank 1 does ``order`` (a forward that fails or a microbatch), rank 0 its own count in peace."""
    rank = dist.get_rank()
    for place in ("embed", "blocks.1", "head"):
        reference = reference_gradients(tiny_model(), 0, counts)
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **options)
        for _ in range(3):
            engine.begin_minibatch(counts[0] if rank == 0 else announced)
            index = 0
            for word in order if rank == 1 else ["good"] * counts[0]:
                x, y = microbatch(0, rank, index)
                if word == "fails":
                    _fail_in(model.get_submodule(place), model, x)
                else:
                    loss_of(model, x, y, rows(0, counts)).backward()
                    index += 1
            engine.settle()
            assert all(isinstance(p, DTensor) for p in model.parameters()), place
            assert worst_relative_error(model, reference) < 1e-6, place
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        engine.detach()


def given_up_as_the_last() -> None:
    for parameters in ("reshard", "resident"):
        _train(2, ["good", "fails"], [2, 1], parameters=parameters)
    _train(None, ["good", "fails"], [2, 1])
    _train(2, ["good", "fails"], [2, 1], accumulate="owner")


def given_up_as_the_first() -> None:
    _train(2, ["fails", "good"], [1, 1])
    _train(2, ["fails", "good"], [1, 1], accumulate="owner", parameters="resident")


def given_up_as_the_only_one() -> None:
    _train(1, ["fails"], [2, 0])


def tried_again() -> None:
    for parameters in ("reshard", "resident"):
        _train(1, ["fails", "good"], [1, 1], parameters=parameters)
    _train(2, ["good", "fails", "fails", "good"], [1, 2], accumulate="owner")
    _train(3, ["fails", "good", "good", "fails", "good"], [2, 3])


def one_too_few_is_still_told() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    engine.begin_minibatch(4)
    x, y = microbatch(0, dist.get_rank(), 0)
    _fail_in(model.head, model, x)
    loss_of(model, x, y, 1).backward()
    dist.barrier()
    with pytest.raises(OdcError, match=r"after 1 microbatches where .*announced 4"):  # who comes second may hear it from the first
        engine.settle()
    dist.barrier()


CHECKS = {
    f.__name__: f for f in (given_up_as_the_last, given_up_as_the_first, given_up_as_the_only_one, tried_again, one_too_few_is_still_told)
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_a_caught_forward(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
