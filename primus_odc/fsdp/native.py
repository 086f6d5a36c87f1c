"""FSDP2's own collectives: communication objects that give a module its native communication back after ``detach()``.

FSDP2's default objects are private; these make the same public ``torch.distributed`` calls. torch 2.13 renamed the two single-tensor
collectives and deprecated the old names; 2.11 and 2.12 have only those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

all_gather_single: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.no_grad()
def whole(parameter: DTensor) -> torch.Tensor:
    """All rows of a parameter that FSDP2 shards by rows, on every rank of its shard group (collective), as ``DTensor.full_tensor()``.

    Over gloo that may damage the process's heap. The two threads of a gloo group note the name of what they have finished in one string,
    without a lock (torch 2.11 to 2.13, ``ProcessGroupGloo::runLoop``). A name of more than 15 characters lies on the heap, as that of the
    functional all-gather in ``full_tensor()``, ``ALLGATHER_COALESCED``; if one thread is late, both free the same one. What is called here
    has a short name.
    """
    group = parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
    mine = parameter.to_local()
    rows = -(-parameter.shape[0] // group.size())
    padded = mine.new_zeros(rows, *parameter.shape[1:])
    padded[: mine.shape[0]] = mine
    found = mine.new_empty(group.size() * rows, *parameter.shape[1:])
    all_gather_single(found, padded, group=group)
    return found[: parameter.shape[0]]


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
