"""The three primitives in plain torch, on lists of tensors of one process: what they mean, without epochs, words or memory.

Shapes: S shards (owners), n elements of a group's shard. Sums are taken in ``dtype`` in the order that the ``local`` mode of the data
plane keeps as well (contributions of a source in the order they came, then sources in rank order), so that its results can be compared
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.spec import GroupSpec


def gather(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """All shards of a group, side by side: S tensors ``[n]`` become ``[S, n]``."""
    return torch.stack(list(shards))


def unpack(group: GroupSpec, contribution: Contribution, dtype: torch.dtype) -> torch.Tensor:
    """A contribution in the group's full gradient layout, ``[S, grad_numel]``; parameters it does not hold are zero."""
    full = torch.zeros(group.shards, group.grad_numel, dtype=dtype, device="cpu")
    cursor = 0
    for index in contribution.params:
        p = group.params[index]
        full[:, p.grad_offset : p.grad_offset + p.padded_numel] = contribution.rows[:, cursor : cursor + p.padded_numel]
        cursor += p.padded_numel
    return full


def scatter_accumulate(accumulators: Sequence[torch.Tensor], gradients: torch.Tensor) -> None:
    """Add row o of ``gradients`` (``[S, n]``) to the accumulator (``[n]``) of owner o, in place."""
    for accumulator, row in zip(accumulators, gradients, strict=True):
        accumulator += row


def settle(group: GroupSpec, sources: Sequence[Sequence[Contribution]], dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradient shard ``[grad_numel]`` of every owner: the sum over all contributions of all sources (one list each, may be empty)."""
    total = [torch.zeros(group.grad_numel, dtype=dtype, device="cpu") for _ in range(group.shards)]
    for contributions in sources:
        mine = [torch.zeros(group.grad_numel, dtype=dtype, device="cpu") for _ in range(group.shards)]
        for contribution in contributions:
            scatter_accumulate(mine, unpack(group, contribution, dtype))
        scatter_accumulate(total, torch.stack(mine))
    return total
