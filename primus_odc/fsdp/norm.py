"""The gradient norm over all shards of a model: one operation over each persistent buffer, one number per rank to exchange.

In host memory the numbers travel through the heap. On a device they meet in one all-reduce, which no host waits for: clipping needs a few
launches, whatever the number of parameters.

With its number every rank says what it is of, by a tag made from ``norm_type`` and ``max_norm``: parts of different norms add up to
nothing, and shards clipped to different norms make no gradient. In host memory a rank that differs is told at once. On a device the tags
are compared there and the norm becomes NaN at once; why is told by the next call that finds the answer on the host, without waiting for it.
A whole replica of HSDP that differs from the others is not seen: no norm is exchanged between replicas.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import torch
import torch.distributed as dist

from primus_odc.errors import ProtocolError
from primus_odc.fsdp.gradients import GradientStore
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.lanes import Lanes
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.scalar import TAGS, exchange_scalar
from primus_odc.symmetric.heap import SymmetricHeap


class NormCheck:
    """One rank's answer to whether its shard group took the same norms. On a device answers are collected there, and copied to the host
    whenever no copy is on its way."""

    def __init__(self, mesh: Mesh, lanes: Lanes, device: torch.device) -> None:
        self._me = mesh.names[mesh.rank]
        self._lanes = lanes
        self._copied: Any = None
        """After the copy that is on its way, or the last one; None before the first."""
        if device.type != "cpu":
            self._differs = torch.zeros((), dtype=torch.bool, device=device)
            self._fetched = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)

    def collect(self, differs: torch.Tensor) -> None:
        """``differs``: 0-dim bool on the device.

        Raises:
            ProtocolError: as :meth:`require_same`, about earlier norms.
        """
        self._differs.logical_or_(differs)
        if self._copied is None:
            self._copied = self._lanes.event()
        elif not self._copied.query():
            return  # what was found stays found, and the next copy brings it
        self.require_same()
        self._fetched.copy_(self._differs, non_blocking=True)
        self._lanes.record(self._copied)

    def require_same(self) -> None:
        """Tell what has arrived on the host so far; waits for nothing.

        Raises:
            ProtocolError: ranks took another norm than this one, or clipped to another.
        """
        if self._copied is not None and self._copied.query() and bool(self._fetched):
            self.refuse("other ranks", "a norm")

    def refuse(self, who: str, what: str) -> None:
        """
        Raises:
            ProtocolError: ``who`` did not do what this rank did.
        """
        raise ProtocolError(
            f"{self._me}: this rank took {what}, and {who} took another one or clipped to another; call clip_grad_norm_ or grad_norm "
            "with the same norm_type and max_norm on every rank"
        )


def global_norm(
    gradients: GradientStore,
    mesh: Mesh,
    heap: SymmetricHeap,
    protocol: RankProtocol,
    norm_type: float,
    max_norm: float,
    check: NormCheck,
    operation: str,
) -> torch.Tensor:
    """The norm as a 0-dim fp64 tensor where the gradients are; every rank of the shard group makes the call, after settle.

    Sums are fp64 and equal on all ranks; a NaN on any rank makes the norm NaN, whatever ``norm_type``.

    Raises:
        ProtocolError: a rank of the shard group took another norm, or clips to another ``max_norm`` (host memory).
    """
    mine = gradients.local_power_sum(norm_type)
    tag = norm_tag(norm_type, max_norm)
    if mine.device.type == "cpu":
        found = exchange_scalar(heap, protocol, float(mine), tag, operation)
        if others := [mesh.names[r] for r, (_, theirs) in zip(mesh.peers, found, strict=True) if theirs != tag]:
            check.refuse(", ".join(others), f"the norm of type {norm_type:g} with max_norm {max_norm:g}")
        return _combined(torch.tensor([value for value, _ in found], dtype=torch.float64, device="cpu"), norm_type)
    # Every rank's numbers in places of their own: sums keep rank order, and a maximum does not lose a NaN in the library's comparison.
    parts = torch.zeros(2, mesh.shards, dtype=torch.float64, device=mine.device)
    parts[0, mesh.shard_index] = mine
    parts[1, mesh.shard_index].fill_(tag)  # assigned, it would come from the host, which then waits for the device
    dist.all_reduce(parts, group=mesh.shard_group)
    differs = (parts[1] != tag).any()
    check.collect(differs)
    return _combined(parts[0], norm_type).masked_fill(differs, math.nan)


def norm_tag(norm_type: float, max_norm: float) -> int:
    """A number below :data:`~primus_odc.primitives.scalar.TAGS`, another one for nearly every other pair."""
    same = math.nan if math.isnan(max_norm) else max_norm + 0.0  # one NaN, one zero
    return zlib.crc32(struct.pack("=dd", norm_type, same)) % TAGS


def _combined(parts: torch.Tensor, norm_type: float) -> torch.Tensor:
    return parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)


def clip(gradients: GradientStore, norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``; a norm that is not a number reaches every gradient."""
    if math.isinf(max_norm):
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return  # on a device asking would make the host wait
    gradients.scale(factor)
