"""What the engine adds to a device, against its formula: as the driver and torch's allocator see it, after attach and after training."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import primus_odc
from tests.gpu.models import inputs, loss, require_gpus, shard_wide, wide
from tests.workers import run_workers

TOLERANCE = 0.02
PAGE = 2 << 20
"""Granularity of the driver's allocations."""


def in_use(device: int) -> int:
    """Bytes of the device outside torch's caching allocator, and those allocated in it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + torch.cuda.memory_allocated(device)


def added(rank: int, world_size: int, options: dict[str, Any], beside_another: bool = False) -> list[tuple[int, int]]:
    """(formula without what a library keeps, measured) after attach, and after minibatches; the engine before, with which a library takes
    what it keeps, is gone or (``beside_another``) stays."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    warm = primus_odc.attach(shard_wide(wide(depth=1), mp_policy=policy), **options)  # what a first engine loads stays
    warm.begin_minibatch(0)
    warm.settle()
    if not beside_another:
        warm.detach()
        del warm
    model = shard_wide(wide(depth=96), mp_policy=policy)  # 400 MB of fp32
    loss(model, inputs(0, rank, 0)).backward()  # libraries, and what FSDP2 keeps
    model.zero_grad()
    before = in_use(rank)
    engine = primus_odc.attach(model, **options)
    formula = sum(engine.memory.values()) - engine.memory.get("library", 0)
    found = [(formula, in_use(rank) - before)]
    for step in range(2):
        engine.begin_minibatch(2)
        for index in range(2):
            loss(model, inputs(step, rank, index)).backward()
        engine.settle()
        model.zero_grad()
    engine.publish()
    found.append((formula, in_use(rank) - before))
    engine.detach()
    if beside_another:
        warm.detach()
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
def test_the_engine_adds_what_its_formula_says(accumulate: str) -> None:
    require_gpus(2, shared=False)
    options = {"accumulate": accumulate, "parameters": "reshard"}
    for found in run_workers(added, 2, options, timeout_s=160, gpu=True):
        for formula, measured in found:
            assert abs(measured - formula) <= TOLERANCE * formula + 4 * PAGE, found
