"""An optimizer's step before settle would find no gradient and do nothing, for ever and without a word: it is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks

import primus_odc
from primus_odc.errors import ProtocolError
from tests.fsdp.checks import Check, failures, relative_error, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, shard, tiny_model
from tests.workers import run_workers

REFUSED = r"step\(\) inside a minibatch.*embed\.weight.*settle\(\)"
OPTIMIZERS: tuple[Callable[[Tiny], torch.optim.Optimizer], ...] = (
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
)


def refused_before_settle_and_harmless() -> None:
    for make in OPTIMIZERS:
        model, whole = shard(tiny_model()), tiny_model()
        optimizer, other = make(model), make(whole)
        engine = primus_odc.attach(model)
        for step in range(2):
            engine.begin_minibatch(1)
            loss_of(model, *microbatch(step, dist.get_rank(), 0), 1).backward()
            with pytest.raises(ProtocolError, match=REFUSED):
                optimizer.step()
            engine.settle()
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                loss_of(whole, *microbatch(step, rank, 0), 1).backward()
            other.step()
            other.zero_grad()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert relative_error(full(p), q) <= 1e-5, name
        engine.detach()


def refused_when_nothing_ran_and_what_was_not_zeroed_is_there() -> None:
    model = shard(tiny_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = primus_odc.attach(model)
    for _ in range(2):
        engine.begin_minibatch(0)
        with pytest.raises(ProtocolError, match=REFUSED):
            optimizer.step()
        engine.settle()
        optimizer.step()
    engine.detach()


def optimizers_of_other_parameters_step() -> None:
    model, teacher = shard(tiny_model()), tiny_model()
    model.head.requires_grad_(False)
    optimizers = [torch.optim.SGD(teacher.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    engine = primus_odc.attach(model)
    engine.begin_minibatch(0)
    for optimizer in optimizers:
        optimizer.step()
    engine.settle()
    engine.detach()


def nothing_is_left_of_it() -> None:
    before = dict(_global_optimizer_pre_hooks)
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    engine.detach()
    assert dict(_global_optimizer_pre_hooks) == before
    engine = primus_odc.attach(model)
    dist.barrier()  # a rank that drops its engine must not end another's attach()
    del model, engine
    gc.collect()
    assert dict(_global_optimizer_pre_hooks) == before


CHECKS: dict[str, Check] = {
    "refused_before_settle_and_harmless": refused_before_settle_and_harmless,
    "refused_when_nothing_ran": refused_when_nothing_ran_and_what_was_not_zeroed_is_there,
    "optimizers_of_other_parameters_step": optimizers_of_other_parameters_step,
    "nothing_is_left_of_it": nothing_is_left_of_it,
}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_steps(on_two: list[dict[str, str]], name: str) -> None:
    assert failures(on_two, name) == ""
