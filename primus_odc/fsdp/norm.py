"""The gradient norm over all shards of a model: one operation over each persistent buffer, one number per rank to exchange.

In host memory the numbers travel through the heap. On a device they meet in one all-reduce, which no host waits for: clipping then is
three launches, whatever the number of parameters.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from primus_odc.fsdp.gradients import GradientStore
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.scalar import exchange_scalar
from primus_odc.symmetric.heap import SymmetricHeap


def global_norm(
    gradients: GradientStore, mesh: Mesh, heap: SymmetricHeap, protocol: RankProtocol, norm_type: float, operation: str
) -> torch.Tensor:
    """The norm as a 0-dim fp64 tensor where the gradients are; every rank of the shard group makes the call, after settle.

    Sums are fp64 and equal on all ranks; a NaN on any rank makes the norm NaN, whatever ``norm_type``.
    """
    mine = gradients.local_power_sum(norm_type)
    if mine.device.type == "cpu":
        parts = torch.tensor(exchange_scalar(heap, protocol, float(mine), operation), dtype=torch.float64)
    else:
        # Every rank's number in a place of its own: sums keep rank order, and a maximum does not lose a NaN in the library's comparison.
        parts = torch.zeros(mesh.shards, dtype=torch.float64, device=mine.device)
        parts[mesh.shard_index] = mine
        dist.all_reduce(parts, group=mesh.shard_group)
    return parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)


def clip(gradients: GradientStore, norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``; a norm that is not a number reaches every gradient."""
    if math.isinf(max_norm):
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return  # on a device asking would make the host wait
    gradients.scale(factor)
