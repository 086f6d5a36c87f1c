"""GPUs of one machine taken for nodes (``ranks_per_node``): the protocol across nodes in device streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.models import check_gradients, tiny_model
from tests.gpu.models import require_gpus
from tests.gpu.test_engine import MODES, TINY, VERIFIED, many_minibatches
from tests.workers import run_workers


def _spread(options: dict[str, Any], world_size: int) -> dict[str, Any]:
    return {**options, "ranks_per_node": world_size // 2}


LOCAL = [options for options in MODES + VERIFIED if options["accumulate"] == "local"]


def tiny(rank: int, world_size: int) -> dict[str, float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    errors = {}
    for shape in [(world_size,), (2, world_size // 2)]:  # the second: HSDP with its shard groups inside nodes
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for options in LOCAL:
            error = check_gradients(tiny_model, TINY[world_size], _spread(options, world_size), mesh, device="cuda")
            errors[f"{shape} {options}"] = error
    return errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_gradients_equal_one_process(world_size: int) -> None:
    require_gpus(world_size)
    for errors in run_workers(tiny, world_size, timeout_s=220, gpu=True):
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("parameters", ["reshard", "resident"])
def test_many_minibatches_with_hosts_that_drift_apart(world_size: int, parameters: str) -> None:
    require_gpus(world_size)
    options = _spread({"parameters": parameters}, world_size)
    for errors in run_workers(many_minibatches, world_size, options, timeout_s=220, gpu=True):
        assert max(errors) <= 1e-6, errors
