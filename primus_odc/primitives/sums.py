"""The sum over sources that settles one group on its owner; which code runs depends on where the memory is, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Sum = Callable[[torch.Tensor, Sequence[int]], None]
"""``(total, ranks)``: total := the sum over these ranks' slices, in this order; zeros for none."""


def make_sum(sources: Mapping[int, torch.Tensor], device: torch.device) -> Sum:
    """The sum over ``sources`` (rank -> its slice ``[n]``, in the order of addition).

    Raises:
        ImportError: on a device without Triton, which torch's builds for CUDA and ROCm bring with them.
    """
    if device.type == "cpu":

        def sum_on_host(total: torch.Tensor, ranks: Sequence[int]) -> None:
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
    return lambda total, ranks: kernel(total, [numbers[r] for r in ranks])
