"""A model large enough that transfers and compute overlap, its single-process reference, and what every GPU test needs."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from primus_odc.symmetric.shmem.extension import Library
from tests.fsdp.models import full as whole

WIDTH = 512
SHMEM: Library = "mori" if torch.version.hip else "nvshmem"
"""The library between nodes for the GPUs of this machine."""


def require_gpus(count: int, shared: bool = True) -> None:
    """Skip a test on a machine with fewer GPUs. ``SHARE_GPUS=1`` in the environment lets ranks share them, in tests that need neither
    NCCL nor a GPU of their own (``shared``): what no stream may do is wait for a peer, so that it does not matter."""
    found = torch.cuda.device_count()
    if found < count and not (shared and found and os.environ.get("SHARE_GPUS") == "1"):
        pytest.skip(f"needs {count} GPU(s), this machine has {found}")


def require_shmem(world_size: int, shared: bool = True) -> None:
    """As :func:`require_gpus`, and skip where the kernels for several nodes were not built."""
    require_gpus(world_size, shared)
    if importlib.util.find_spec(f"primus_odc.symmetric.shmem._{SHMEM}") is None:
        pytest.skip("needs the native module: scripts/test_shmem.sh builds it")


class Wide(nn.Module):
    """Units of 2 MiB of fp32 and an odd tail; deep enough that backward takes a while."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        y: torch.Tensor = self.head(x)
        return y


def wide(device: str = "cuda", dtype: torch.dtype = torch.float32, depth: int = 6) -> Wide:
    torch.manual_seed(3)
    return Wide(depth).to(device=device, dtype=dtype)


def shard_wide(model: Wide, mesh: DeviceMesh | None = None, **options: Any) -> Wide:
    mesh = mesh or init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def inputs(step: int, rank: int, index: int, rows: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10007 * step + 101 * rank + index)
    return torch.randn(rows, WIDTH, generator=generator).cuda()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # Far from its minimum: near it gradients are differences of nearly equal numbers, and fp32 itself is off by more than 1e-6.
    y: torch.Tensor = model(x)
    return F.mse_loss(y, torch.full_like(y, 5.0), reduction="sum") / 1000


def reference(model: Wide, step: int, counts: list[int]) -> dict[str, torch.Tensor]:
    """fp64 gradients of every microbatch of every rank, in one process; ``model`` is a whole fp64 model."""
    model.zero_grad()
    for rank, count in enumerate(counts):
        for index in range(count):
            loss(model, inputs(step, rank, index).double()).backward()
    return {name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def worst_error(model: nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """Largest relative L2 difference of a parameter's gradient (collective)."""
    worst = 0.0
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        difference = (whole(p.grad).double() - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        worst = max(worst, float(difference))
    return worst
