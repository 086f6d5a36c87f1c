"""The engine against a single process in fp64: gradients of every parameter, for any assignment of microbatches to ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.models import check_gradients, tiny_model
from tests.workers import run_workers

MODES: list[dict[str, Any]] = [
    {"accumulate": "local", "parameters": "reshard"},
    {"accumulate": "local", "parameters": "resident"},
    {"accumulate": "owner", "parameters": "reshard"},
    {"accumulate": "owner", "parameters": "resident"},
    {"accumulate": "local", "parameters": "reshard", "verify": "checksum"},
    {"accumulate": "owner", "parameters": "resident", "verify": "checksum"},
    {"accumulate": "local", "parameters": "resident", "verify": "reference"},
    {"accumulate": "owner", "parameters": "reshard", "verify": "reference"},
]
SHARDINGS: list[dict[str, Any]] = [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}]
COUNTS = {
    1: [[2], [0], [1]],
    2: [[3, 1], [0, 2], [1, 1], [0, 0], [2, 0]],
    3: [[3, 1, 0], [0, 2, 1], [1, 1, 1], [0, 0, 4]],
    4: [[3, 1, 0, 2], [1, 1, 1, 1], [0, 0, 5, 1]],
}


def _all_modes(rank: int, world_size: int, meshes: list[tuple[int, ...]], shardings: list[dict[str, Any]]) -> dict[str, float]:
    errors = {}
    for shape in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for sharding in shardings:
            # Every mode with the first mesh and sharding, and with the others one of each kind.
            for options in MODES if sharding is shardings[0] and shape == meshes[0] else (MODES[0], MODES[3]):
                error = check_gradients(tiny_model, COUNTS[world_size], options, mesh, sharding)
                errors[f"{shape} {sharding} {options}"] = error
                dist.barrier()
    return errors


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("world_size", "meshes", "shardings"),
    [
        (1, [(1,)], SHARDINGS[:1]),
        (2, [(2,), (2, 1), (1, 2)], SHARDINGS),
        (3, [(3,)], SHARDINGS[:1]),
        (4, [(4,), (2, 2)], [{}, {"reshard_after_forward": 2}]),
        (4, [(4, 1)], [{}]),
    ],
)
def test_gradients_equal_one_process(world_size: int, meshes: list[tuple[int, ...]], shardings: list[dict[str, Any]]) -> None:
    for errors in run_workers(_all_modes, world_size, meshes, shardings, timeout_s=120):
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}
