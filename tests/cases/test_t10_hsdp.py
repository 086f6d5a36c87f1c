"""T10: HSDP over 2 replicas x 2 shards has the gradients of FSDP over 4 ranks.

Right: both within 1e-6 of one process in fp64, with unequal microbatch counts in and between the replicas, so no factor of the number of
replicas; and the replicas stay equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import primus_odc
from tests.cases.gpt_ranks import (
    MODES,
    TOLERANCE,
    VERIFIED,
    Gradients,
    full_gradients,
    make_samples,
    reference_gradients,
    run_minibatch,
    sharded_gpt,
)
from tests.megatron.gpt_cases import relative_error
from tests.workers import run_workers

LENGTHS = (9, 2, 17, 5, 3, 12)
# [minibatch][rank] -> microbatches; ranks 0 and 1 are the first replica.
ASSIGNMENTS: list[list[list[list[int]]]] = [[[[0], [1], [2]], [[3]], [], [[4, 5]]], [[], [], [[5, 0]], [[1], [2, 3], [4]]]]
SHAPES = ((4,), (2, 2))


def _gradients(rank: int, shape: tuple[int, ...], mode: dict[str, Any]) -> list[Gradients]:
    """Of every minibatch, the parameters moving between them, on a mesh of ``shape``."""
    samples = make_samples(LENGTHS)
    model, weights = sharded_gpt(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = primus_odc.attach(model, **mode)
    found = []
    for assignment in ASSIGNMENTS:
        expected = reference_gradients(weights, samples)
        run_minibatch(engine, model, samples, assignment[rank])
        found.append(full_gradients(model))
        for name, gradient in found[-1].items():
            assert relative_error(gradient, expected[name]) <= TOLERANCE, name
        optimizer.step()
        weights = {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert _equal_on_all_ranks(weights)
    engine.detach()
    return found


def _equal_on_all_ranks(weights: Gradients) -> bool:
    mine = torch.cat([w.reshape(-1) for w in weights.values()])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return all(torch.equal(mine, other) for other in theirs)


def _compare(rank: int, world_size: int) -> None:
    for mode in (*MODES, VERIFIED):
        fsdp, hsdp = (_gradients(rank, shape, mode) for shape in SHAPES)
        for first, second in zip(fsdp, hsdp, strict=True):
            for name in first:
                assert relative_error(second[name], first[name]) <= TOLERANCE, (mode, name)


@pytest.mark.timeout(120)
def test_hsdp_equals_fsdp() -> None:
    run_workers(_compare, 4, timeout_s=100)
