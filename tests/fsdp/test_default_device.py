"""A script's ``torch.set_default_device()`` moves nothing of the engine's away: from host memory, or from where the model is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import primus_odc
from tests.fsdp.models import loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [2, 1]
OPTIONS: list[dict[str, Any]] = [
    {"parameters": "reshard"},
    {"parameters": "resident"},
    {"accumulate": "owner"},
    {"verify": "checksum"},
    {"verify": "reference"},
]


def on_another_device(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float]:
    """Worst relative error of a gradient, and of the norm, where tensors without a device have no memory at all."""
    inputs = [[microbatch(step, rank, i) for i in range(COUNTS[rank])] for step in range(2)]
    references = [reference_gradients(tiny_model(), step, COUNTS) for step in range(2)]
    totals = [rows(step, COUNTS) for step in range(2)]
    model = shard(tiny_model())
    worst = of_norm = 0.0
    torch.set_default_device("meta")
    engine = primus_odc.attach(model, **options)
    for step in range(2):
        engine.begin_minibatch(COUNTS[rank])
        for x, y in inputs[step]:
            loss_of(model, x, y, totals[step]).backward()
        engine.settle()
        found, clipped = engine.grad_norm(), float(engine.clip_grad_norm_(1e6))
        torch.set_default_device("cpu")
        worst = max(worst, worst_relative_error(model, references[step]))
        norm = math.sqrt(sum(float(g.square().sum()) for g in references[step].values()))
        of_norm = max(of_norm, abs(found / norm - 1), abs(clipped / norm - 1))
        torch.set_default_device("meta")
        model.zero_grad()
        engine.publish()
        with torch.no_grad():
            model(inputs[0][0][0])
    engine.detach()
    torch.set_default_device("cpu")
    dist.barrier()
    return worst, of_norm


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
def test_another_default_device(options: dict[str, Any]) -> None:
    for worst, of_norm in run_workers(on_another_device, 2, options):
        assert worst < 1e-6
        assert of_norm < 1e-6
