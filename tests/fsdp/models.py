"""Small models and the independent reference the engine is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import primus_odc


class Block(nn.Module):
    """Dimensions that do not divide by 2, 3 or 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Tiny(nn.Module):
    blocks: Any  # nn.ModuleList, indexed as whatever a test put there

    def __init__(self, width: int = 7, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def tiny_model(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def shard(model: Tiny, mesh: DeviceMesh | None = None, **kwargs: Any) -> Tiny:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def microbatch(step: int, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one microbatch: the same in whatever process they are made."""
    g = torch.Generator().manual_seed(1000003 * step + 1009 * rank + index)
    n = 1 + (step + rank + index) % 4
    return torch.randn(n, 5, generator=g), torch.randn(n, 3, generator=g)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
    return F.mse_loss(model(x), y, reduction="sum") / total


def rows(step: int, counts: list[int]) -> int:
    return sum(microbatch(step, r, i)[0].shape[0] for r, n in enumerate(counts) for i in range(n))


def reference_gradients(model: nn.Module, step: int, counts: list[int]) -> dict[str, torch.Tensor]:
    """fp64, one process, every microbatch of every rank; ``model`` holds the full parameters."""
    double = copy.deepcopy(model).double()
    total = max(rows(step, counts), 1)
    for r, n in enumerate(counts):
        for i in range(n):
            x, y = microbatch(step, r, i)
            loss_of(double, x.double(), y.double(), total).backward()
    return {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in double.named_parameters() if p.requires_grad}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank (collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.device_type == "cpu" or dist.get_world_size() <= torch.cuda.device_count():
        return tensor.full_tensor()
    pieces: list[Any] = [None] * mesh.size(mesh.ndim - 1)  # ranks that share a GPU have gloo, whose functional all-gather takes CPU tensors
    dist.all_gather_object(pieces, tensor.to_local().cpu(), mesh.get_group(mesh.ndim - 1))
    return torch.cat(pieces).to(tensor.device)


def worst_relative_error(model: nn.Module, reference: dict[str, torch.Tensor]) -> float:
    """Largest L2 error of a parameter's gradient, relative to its norm, or to a tenth of the whole gradient's where that is larger: where
    microbatches cancel out, fp32 itself is off by more than 1e-6 of what is left of them."""
    whole = torch.stack([g.norm() for g in reference.values()]).norm()
    worst = 0.0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert p.grad is not None, f"{name} has no gradient"
        error = (full(p.grad).cpu().double() - reference[name]).norm()
        worst = max(worst, float(error / torch.maximum(reference[name].norm(), whole / 10).clamp_min(1e-30)))
    return worst


def check_gradients(
    make: Callable[[], Tiny],
    counts: list[list[int]],
    options: dict[str, Any],
    mesh: DeviceMesh | None = None,
    sharding: dict[str, Any] | None = None,
    device: str = "cpu",
) -> float:
    """Train for ``len(counts)`` minibatches on demand; the worst relative gradient error of any parameter in any of them."""
    rank = dist.get_rank()
    whole = make()
    model = shard(make().to(device), mesh, **(sharding or {}))
    engine = primus_odc.attach(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worst = 0.0
    for step, row in enumerate(counts):
        engine.begin_minibatch(row[rank])
        for i in range(row[rank]):
            x, y = microbatch(step, rank, i)
            loss_of(model, x.to(device), y.to(device), rows(step, row)).backward()
        engine.settle()
        whole.load_state_dict({k: full(v).cpu() for k, v in model.state_dict().items()})
        worst = max(worst, worst_relative_error(model, reference_gradients(whole, step, row)))
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    return worst
