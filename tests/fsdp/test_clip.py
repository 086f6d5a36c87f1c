"""Clipping to far below the norm, in every dtype of gradients: each is what fp64 gives, rounded once."""

from __future__ import annotations

import math

import pytest
import torch

import primus_odc
from tests.fsdp.models import shard, tiny_model
from tests.workers import run_workers

VALUE, MAX_NORM = 60000.0, 1e-2
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def clipped(rank: int, world_size: int) -> dict[torch.dtype, tuple[float, float, float]]:
    """``(norm, smallest gradient, largest gradient)`` by dtype, where all gradients were ``VALUE``."""
    found = {}
    for dtype in DTYPES:
        model = shard(tiny_model().to(dtype))
        engine = primus_odc.attach(model)
        engine.begin_minibatch(0)
        engine.settle()
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        for gradient in gradients:
            gradient.fill_(VALUE)
        norm = float(engine.clip_grad_norm_(MAX_NORM))
        values = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        found[dtype] = norm, float(values.min()), float(values.max())
        engine.detach()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[torch.dtype, tuple[float, float, float]]]:
    return run_workers(clipped, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipping_rounds_once(outcomes: list[dict[torch.dtype, tuple[float, float, float]]], dtype: torch.dtype) -> None:
    value = float(torch.tensor(VALUE, dtype=dtype))
    expected = value * math.sqrt(sum(p.numel() for p in tiny_model().parameters()))
    want = float(torch.tensor(value * (MAX_NORM / expected), dtype=torch.float64).to(dtype))
    for norm, smallest, largest in (found[dtype] for found in outcomes):
        assert math.isclose(norm, expected, rel_tol=1e-6)
        assert math.isclose(smallest, want, rel_tol=1e-6) and math.isclose(largest, want, rel_tol=1e-6), (smallest, largest, want)
