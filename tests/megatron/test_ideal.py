"""The replica that a comparison calls ideal takes over the weights of an arm."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from primus_odc.fsdp.native import whole
from primus_odc.megatron.ideal import Ideal
from tests.megatron.arm_cases import PARAMS, make_arm, weights
from tests.megatron.gpt_cases import CPU, VOCAB
from tests.workers import run_workers


def _follow(rank: int, world_size: int) -> list[str]:
    """What ``follow`` calls: the names of its collectives."""
    arm = make_arm("odc_nopad")
    ideal = Ideal(arm, PARAMS, VOCAB, CPU)
    with torch.no_grad():
        for number, parameter in enumerate(arm.model.parameters()):
            assert isinstance(parameter, DTensor)
            parameter.to_local().add_(number + rank)
    with CommDebugMode() as calls:
        ideal.follow()
    expected = weights(arm)
    replica = dict(ideal._replica.model.named_parameters())
    assert replica.keys() == expected.keys()
    for name, parameter in replica.items():
        assert torch.equal(parameter, expected[name]), name
    arm.close()
    return [str(call) for call in calls.get_comm_counts()]


def test_it_takes_over_the_weights_without_a_functional_collective() -> None:
    """Those have names that gloo's threads cannot share (:func:`primus_odc.fsdp.native.whole`)."""
    for calls in run_workers(_follow, 2):
        assert calls and all(call.startswith("c10d.") for call in calls), calls


def _whole(rank: int, world_size: int, replicas: int) -> None:
    shape, names = ((world_size,), ("shard",)) if replicas == 1 else ((replicas, world_size // replicas), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for rows in (1, 2, 3, 5, 8):
        torch.manual_seed(rows)
        model = torch.nn.Linear(3, rows)
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        fully_shard(model, mesh=mesh)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(whole(parameter), expected[name]), f"{name} of {rows} rows"


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_parameters_with_any_number_of_rows_are_gathered_whole(ranks: int, replicas: int) -> None:
    run_workers(_whole, ranks, replicas)
