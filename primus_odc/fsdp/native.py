"""Communication objects that give a module FSDP2's own collectives back after ``detach()``.

FSDP2's default objects are private; these make the same public ``torch.distributed`` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class NativeAllGather(_Allocate):
    """``all_gather_into_tensor``, as FSDP2 does it by default."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class NativeReduceScatter(_Allocate):
    """``reduce_scatter_tensor``, as FSDP2 does it by default."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
