"""A gather that was begun and never waited for is of its own epoch: nothing later is computed with it, and nobody stumbles over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import primus_odc
from tests.fsdp.checks import Check, failures, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [[1, 0], [1, 1], [0, 1]]


def _break(*_: object) -> None:
    raise ValueError("broken on purpose")


def _unshard(part: str, model: Tiny) -> None:
    module: torch.nn.Module = model.get_submodule(part)
    module.unshard(async_op=True)  # type: ignore[operator]


def _fail_behind_a_prefetch(model: Tiny) -> None:
    handle = model.blocks[0].register_forward_hook(_break)
    with torch.no_grad(), pytest.raises(ValueError, match="broken on purpose"):
        model(torch.ones(1, 5))
    handle.remove()


def _train(begin: Callable[[Tiny], None], where: str, parameters: str) -> None:
    """Three minibatches with ``begin`` where a minibatch begins, between two of them (an evaluation), or behind the last backward."""
    rank, model, whole = dist.get_rank(), shard(tiny_model()), tiny_model()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    engine = primus_odc.attach(model, parameters=parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, counts in enumerate(COUNTS):
        if where == "evaluation":
            begin(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
            engine.publish()
        engine.begin_minibatch(counts[rank])
        if where == "first":
            begin(model)
        for i in range(counts[rank]):
            loss_of(model, *microbatch(step, rank, i), rows(step, counts)).backward()
        if where == "last":
            begin(model)
        engine.settle()
        whole.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
        assert worst_relative_error(model, reference_gradients(whole, step, counts)) < 1e-5, step
        optimizer.step()
        optimizer.zero_grad()
        engine.publish()
    engine.detach()


def begun_before_attach() -> None:
    rank, model = dist.get_rank(), shard(tiny_model())
    _unshard("blocks.1", model)
    _unshard("", model)
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    loss_of(model, *microbatch(0, rank, 0), rows(0, [1, 1])).backward()
    engine.settle()
    assert worst_relative_error(model, reference_gradients(tiny_model(), 0, [1, 1])) < 1e-6
    engine.detach()


CHECKS: dict[str, Check] = {"before_attach": begun_before_attach}
for _parameters in ("reshard", "resident"):
    for _where in ("first", "last", "evaluation"):
        for _part in ("", "blocks.1"):
            CHECKS[f"{_part or 'root'}-{_where}-{_parameters}"] = partial(_train, partial(_unshard, _part), _where, _parameters)
    CHECKS[f"prefetch-evaluation-{_parameters}"] = partial(_train, _fail_behind_a_prefetch, "evaluation", _parameters)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_pending_gathers(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
