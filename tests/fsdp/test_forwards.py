"""What evaluations and a user's own FSDP2 switches leave behind does no harm to the next minibatch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

import primus_odc
from primus_odc.errors import OdcError
from tests.fsdp.checks import Check, failures, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [1, 0, 2, 1]


def _whole(model: Tiny) -> Tiny:
    whole = tiny_model()
    whole.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
    return whole


def _evaluate(model: Tiny) -> None:
    with torch.no_grad():
        for i in range(dist.get_rank() + 1):
            model(microbatch(0, dist.get_rank(), i)[0])


def zero_grad_of_the_model_after_an_evaluation(parameters: str) -> None:
    """The root has parameters of its own, which FSDP2 leaves unsharded after a forward."""
    rank, model = dist.get_rank(), shard(tiny_model())
    engine = primus_odc.attach(model, parameters=parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        model.zero_grad()
        whole = _whole(model)
        engine.begin_minibatch(COUNTS[rank])
        for i in range(COUNTS[rank]):
            loss_of(model, *microbatch(step, rank, i), rows(step, COUNTS)).backward()
        engine.settle()
        assert worst_relative_error(model, reference_gradients(whole, step, COUNTS)) <= 1e-6, step
        optimizer.step()
        engine.publish()
        _evaluate(model)
    engine.detach()


def clipping_after_an_evaluation(parameters: str) -> None:
    rank, model = dist.get_rank(), shard(tiny_model())
    engine = primus_odc.attach(model, parameters=parameters)
    whole = _whole(model)
    engine.begin_minibatch(COUNTS[rank])
    for i in range(COUNTS[rank]):
        loss_of(model, *microbatch(0, rank, i), rows(0, COUNTS)).backward()
    engine.settle()
    engine.publish()
    _evaluate(model)
    norm = float(engine.clip_grad_norm_(float("inf")))
    expected = torch.stack([g.norm() for g in reference_gradients(whole, 0, COUNTS).values()]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-6)
    engine.detach()


class _WithMethod(Tiny):
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return Tiny.forward(self, x)


def gradient_synchronisation_switched_on_again(mesh: DeviceMesh | None, how: str, parameters: str = "auto") -> None:
    """``set_requires_gradient_sync(True)`` asks FSDP2 for an all-reduce over replicas in backward, too; ranks run unequal counts here."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), shard(_WithMethod(), mesh)
    register_fsdp_forward_method(model, "predict")
    setters = {name: getattr(model, name) for name in ("set_requires_gradient_sync", "set_requires_all_reduce")}
    engine = primus_odc.attach(model, parameters=parameters)
    whole = _whole(model)
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    engine.begin_minibatch(None if how == "method" else COUNTS[rank])
    for i in range(COUNTS[rank]):
        if how in ("idiom", "method"):
            model.set_requires_gradient_sync(i == COUNTS[rank] - 1)  # type: ignore[operator]
        x, y = microbatch(0, rank, i)
        output: torch.Tensor = model.predict(x) if how == "method" else model(x)  # type: ignore[operator]
        if how == "after":  # its forward
            model.blocks[1].set_requires_all_reduce(True)
            model.set_requires_all_reduce(True, recurse=False)  # type: ignore[operator]
        (F.mse_loss(output, y, reduction="sum") / rows(0, COUNTS)).backward()
    engine.settle()
    assert worst_relative_error(model, reference_gradients(whole, 0, COUNTS)) <= 1e-6
    engine.detach()
    assert {name: getattr(model, name) for name in setters} == setters


def an_edit_between_two_evaluations(parameters: str) -> None:
    """Own rows would be the new ones and everybody else's the old."""
    model = shard(tiny_model())
    engine = primus_odc.attach(model, parameters=parameters)
    _evaluate(model)
    dist.barrier()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    engine.publish()
    _evaluate(model)
    dist.barrier()  # the first rank to refuse tells the others, which must have come as far
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    with pytest.raises(OdcError, match=r"parameters of group \S+ changed after they were published in epoch 2"):
        _evaluate(model)


def _checks(mesh: DeviceMesh | None) -> dict[str, Check]:
    found: dict[str, Check] = {}
    for parameters in ("resident", "reshard"):
        found[f"zero_grad-{parameters}"] = partial(zero_grad_of_the_model_after_an_evaluation, parameters)
        found[f"clip-{parameters}"] = partial(clipping_after_an_evaluation, parameters)
        found[f"edit-{parameters}"] = partial(an_edit_between_two_evaluations, parameters)
    for how in ("once", "idiom", "after"):
        found[f"hsdp-{how}"] = partial(gradient_synchronisation_switched_on_again, mesh, how)
    for parameters in ("resident", "reshard"):
        found[f"hsdp-method-{parameters}"] = partial(gradient_synchronisation_switched_on_again, mesh, "method", parameters)
    return found


def _all_checks(rank: int, world_size: int) -> dict[str, str]:
    return run_checks(rank, world_size, _checks(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(_all_checks, 4, timeout_s=50)


@pytest.mark.parametrize("name", list(_checks(None)))
def test_forwards(outcomes: list[dict[str, str]], name: str) -> None:
    assert not failures(outcomes, name)
