"""FSDP2's own collectives: communication objects that give a module its native communication back after ``detach()``.

FSDP2's default objects are private; these make the same public ``torch.distributed`` calls. torch 2.13 renamed the two single-tensor
collectives and deprecated the old names; 2.11 and 2.12 have only those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

all_gather_single: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OrdinaryMemory:
    """The ``allocate`` of torch's ``Comm`` interface, in memory nobody shares."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class NativeAllGather(OrdinaryMemory):
    """The all-gather FSDP2 does by default."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class NativeReduceScatter(OrdinaryMemory):
    """The reduce-scatter FSDP2 does by default."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
