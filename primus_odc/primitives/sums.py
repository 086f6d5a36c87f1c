"""The sum over sources that settles one group on its owner, and the running sums before it; which code runs depends on where the memory is,
and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class Sum(Protocol):
    """``total`` := the sum over the slices of ``ranks``, in this order; zeros for none. ``alone``: nothing is computed beside it."""

    def __call__(self, total: torch.Tensor, ranks: Sequence[int], *, alone: bool = False) -> None: ...


def make_sum(sources: Mapping[int, torch.Tensor], device: torch.device) -> Sum:
    """The sum over ``sources`` (rank -> its slice ``[n]``, in the order of addition).

    Raises:
        ImportError: on a device without Triton, which torch's builds for CUDA and ROCm bring with them.
    """
    if device.type == "cpu":

        def sum_on_host(total: torch.Tensor, ranks: Sequence[int], *, alone: bool = False) -> None:
            if not ranks:
                total.zero_()
            for position, rank in enumerate(ranks):
                if position:
                    total.add_(sources[rank])
                else:
                    total.copy_(sources[rank])

        return sum_on_host

    from primus_odc.primitives.kernels import PullSum

    kernel = PullSum(list(sources.values()))
    numbers = {rank: number for number, rank in enumerate(sources)}

    def sum_on_device(total: torch.Tensor, ranks: Sequence[int], *, alone: bool = False) -> None:
        kernel(total, [numbers[r] for r in ranks], alone)

    return sum_on_device


def add_into(target: torch.Tensor, source: torch.Tensor, *, fresh: bool, alone: bool = False) -> None:
    """``target`` += ``source``, or := where ``fresh``; ``source`` is cast to the target's dtype. Both ``[n]`` or ``[rows, n]`` with rows
    contiguous. ``alone``: nothing is computed beside it.

    Raises:
        ImportError: as :func:`make_sum`.
    """
    if target.device.type == "cpu":
        if fresh:
            target.copy_(source)
        else:
            target.add_(source)
        return

    from primus_odc.primitives.kernels import accumulate

    if target.ndim == 1 or (target.is_contiguous() and source.is_contiguous()):
        target, source = target.view(1, -1), source.view(1, -1)
    accumulate(target, source, fresh, alone)
