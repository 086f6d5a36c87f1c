"""From its second gather in a minibatch on FSDP2 takes this rank's slice of a unit from what was published."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import primus_odc
from primus_odc.errors import OdcError, ProtocolError
from tests.fsdp.models import Tiny, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

POLICY = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
"""FSDP2 casts the fp32 parameters for every gather; computed is in fp64, so that nothing hides behind rounding."""
COUNTS = [[2, 2], [2, 2]]


def _wide() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=8)


def _rows_or_columns(p: torch.nn.Parameter) -> Shard:
    return Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else Shard(0)


def _backward(model: Tiny, step: int, index: int, counts: list[int] | None = None) -> None:
    x, y = microbatch(step, dist.get_rank(), index)
    loss_of(model, x.double(), y.double(), rows(step, counts or COUNTS[step])).backward()


def edited_between_microbatches(rank: int, world_size: int, by_column: bool) -> float:
    """Parameters change after the first microbatch of a minibatch: its gradients are still those of what was published."""
    make = _wide if by_column else tiny_model
    model = make()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=POLICY, shard_placement_fn=_rows_or_columns if by_column else None)
    engine = primus_odc.attach(model, parameters="reshard")
    for step, counts in enumerate(COUNTS):
        engine.begin_minibatch(counts[rank])
        _backward(model, step, 0)
        if step == 1:  # by then it is known that no unit is resharded to a smaller group
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
        _backward(model, step, 1)
        if step == 0:
            engine.settle()
            model.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1.0)
    engine.settle()
    error = worst_relative_error(model, reference_gradients(make(), 1, COUNTS[1]))
    engine.detach()
    return error


@pytest.mark.parametrize("by_column", [False, True])
def test_microbatches_use_what_was_published(by_column: bool) -> None:
    assert max(run_workers(edited_between_microbatches, 2, by_column)) <= 1e-6


def in_smaller_groups(rank: int, world_size: int) -> float:
    model = shard(tiny_model(), init_device_mesh("cpu", (4,)), mp_policy=POLICY, reshard_after_forward=2)
    engine = primus_odc.attach(model, parameters="reshard", verify="reference")
    worst = 0.0
    for step, counts in enumerate([[1, 1, 2, 0], [2, 0, 1, 3], [0, 2, 1, 1]]):
        engine.begin_minibatch(counts[rank])
        for index in range(counts[rank]):
            _backward(model, step, index, counts)
        engine.settle()
        worst = max(worst, worst_relative_error(model, reference_gradients(tiny_model(), step, counts)))
        model.zero_grad()
    engine.detach()
    return worst


def test_units_that_reshard_to_a_smaller_group_stay_as_they_were() -> None:
    """FSDP2 refuses the extension there."""
    assert max(run_workers(in_smaller_groups, 4)) <= 1e-6


def what_is_left(rank: int, world_size: int) -> dict[str, Any]:
    """Attributes of the local shards, at the end of a backward and where the user looks at them."""
    model = shard(tiny_model(), mp_policy=POLICY)
    engine = primus_odc.attach(model, parameters="reshard")

    def attributes() -> set[str]:
        return {a for p in model.parameters() for a in vars(p._local_tensor)}  # type: ignore[attr-defined]

    found: dict[str, Any] = {}
    for step in range(2):
        engine.begin_minibatch(2)
        for index in range(2):
            _backward(model, step, index)
        found["in it"] = attributes()
        if step == 1:
            with pytest.raises(ProtocolError, match=r"inside a minibatch: take model.state_dict\(\), or do it after settle"):
                torch.save(model.head.weight, io.BytesIO())
            stream = io.BytesIO()
            torch.save(model.state_dict(), stream)
            stream.seek(0)
            loaded = torch.load(stream, weights_only=True)
            found["saved"] = all(torch.equal(loaded[k].to_local(), v.to_local()) for k, v in model.state_dict().items())
        engine.settle()
        found["settled"] = attributes()
        model.zero_grad()
    engine.detach()
    return found


def test_parameters_are_the_users_between_minibatches_and_in_state_dicts() -> None:
    for found in run_workers(what_is_left, 2):
        assert found == {"in it": {"fsdp_pre_all_gather", "fsdp_post_all_gather"}, "saved": True, "settled": set()}


def ran_before(rank: int, world_size: int) -> tuple[float, set[str], str]:
    """Of a model that was evaluated before it was attached: worst error, attributes of its local shards in a backward, what is logged."""
    log = io.StringIO()
    logging.getLogger("primus_odc").addHandler(logging.StreamHandler(log))
    logging.getLogger("primus_odc").setLevel(logging.INFO)
    model = shard(tiny_model(), mp_policy=POLICY)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.float64))
    engine = primus_odc.attach(model, parameters="reshard")
    worst = 0.0
    for step, counts in enumerate(COUNTS):
        engine.begin_minibatch(counts[rank])
        for index in range(counts[rank]):
            _backward(model, step, index)
        found = {a for p in model.parameters() for a in vars(p._local_tensor)}  # type: ignore[attr-defined]
        engine.settle()
        worst = max(worst, worst_relative_error(model, reference_gradients(tiny_model(), step, counts)))
        model.zero_grad()
    engine.detach()
    plain = shard(tiny_model())
    with torch.no_grad():
        plain(torch.ones(1, 5))
    primus_odc.attach(plain, parameters="reshard").detach()  # there is nothing to cast
    primus_odc.attach(model, parameters="resident").detach()  # nor more than one gather
    return worst, found, log.getvalue()


def test_a_model_that_ran_before_it_was_attached_is_gathered_as_before() -> None:
    """FSDP2 made no room for the extension when it first ran."""
    for rank, (worst, found, log) in enumerate(run_workers(ran_before, 2)):
        assert worst <= 1e-6
        assert found == set()
        assert log.count("FSDP2 casts this rank's shard for every gather") == (rank == 0)
        assert log.count("attached ") == 3 * (rank == 0)


def _replace(model: Tiny, factor: float = 2.0) -> None:
    model.load_state_dict({k: v * factor for k, v in model.state_dict().items()}, assign=True)


def _edit(model: Tiny) -> None:
    with torch.no_grad():
        model.blocks[2].up.weight.mul_(2.0)


EDITS = {"in place": _edit, "through .data": lambda model: model.blocks[2].up.weight.data.mul_(2.0), "replaced": _replace}
MOVED = {"moved": lambda model: _replace(model, 1.0)}


def edited_before_a_forward(rank: int, world_size: int, how: str, microbatches: int) -> str:
    """What is said of an edit without publish(), in a minibatch after the first."""
    model = shard(tiny_model(), mp_policy=POLICY)
    engine = primus_odc.attach(model, parameters="reshard")
    engine.begin_minibatch(1)
    _backward(model, 0, 0)
    engine.settle()
    model.zero_grad()
    engine.publish()
    (EDITS | MOVED)[how](model)
    dist.barrier()
    try:
        engine.begin_minibatch(microbatches)
        for index in range(microbatches):
            _backward(model, 0, index)
        engine.settle()
    except OdcError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("microbatches", [0, 1])
@pytest.mark.parametrize("how", EDITS)
def test_an_edit_without_publish_is_found(how: str, microbatches: int) -> None:
    for said in run_workers(edited_before_a_forward, 2, how, microbatches):
        assert re.search(r"parameters of group .* changed after they were published in epoch 2", said), said


def test_parameters_that_only_lie_elsewhere_are_no_edit() -> None:
    assert run_workers(edited_before_a_forward, 2, "moved", 1) == ["nothing"] * 2
