"""The sum over sources that settles one group on its owner, and the running sums before it; which code runs depends on where the memory is,
and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Present = Mapping[int, torch.dtype | None]
"""The sources that have something, in the order of addition, and the dtype of what they have; None: that of the sum."""


class Sum(Protocol):
    """``total`` := the sum over the slices of ``present``, in this order; zeros for none. ``alone``: nothing is computed beside it."""

    def __call__(self, total: torch.Tensor, present: Present, *, alone: bool = False) -> None: ...


def narrow_slice(source: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """The slice of a source that has stayed narrow (:class:`primus_odc.primitives.contribution.UnshardedSum`): it begins ``shift`` bytes
    before where ``source``, ``[n]``, would, and has as many elements, of ``dtype``."""
    start = (source.storage_offset() * source.itemsize - shift) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=source.device).set_(source.untyped_storage(), start, source.shape, (1,))


def make_sum(sources: Mapping[int, torch.Tensor], device: torch.device, shift: int = 0, *, here: bool = False) -> Sum:
    """The sum over ``sources`` (rank -> its slice ``[n]``, in the order of addition); ``shift``: see :func:`narrow_slice`; ``here``: all of
    them are in this rank's own memory.

    Raises:
        ImportError: on a device without Triton, which torch's builds for CUDA and ROCm bring with them.
    """
    if device.type == "cpu":

        def sum_on_host(total: torch.Tensor, present: Present, *, alone: bool = False) -> None:
            if not present:
                total.zero_()
            for position, (rank, dtype) in enumerate(present.items()):
                source = sources[rank] if dtype is None else narrow_slice(sources[rank], shift, dtype)
                if position:
                    total.add_(source)
                else:
                    total.copy_(source)

        return sum_on_host

    from primus_odc.primitives.kernels import PullSum

    kernel = PullSum(list(sources.values()), shift, here=here)
    numbers = {rank: number for number, rank in enumerate(sources)}

    def sum_on_device(total: torch.Tensor, present: Present, *, alone: bool = False) -> None:
        kernel(total, {numbers[r]: dtype for r, dtype in present.items()}, alone)

    return sum_on_device


@dataclass(frozen=True)
class Part:
    """``total`` := the sum over the slices of ``present`` in ``sources`` (rank -> slice), in this order; ``shift`` as in
    :func:`make_sum`."""

    total: torch.Tensor
    sources: Mapping[int, torch.Tensor]
    present: Present
    shift: int = 0


class SumTogether:
    """Sums of several groups of one dtype at once: on a device one launch, so that small groups are one transfer."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            ImportError: as :func:`make_sum`.
        """
        self._device = device
        self._kernel: Any = None
        if device.type != "cpu":
            from primus_odc.primitives.kernels import PullSums

            self._kernel = PullSums()

    def fits(self, groups: int, sources: int) -> bool:
        """Whether so many groups with so many sources are one launch."""
        return self._kernel is None or groups * sources <= self._kernel.MOST_BITS

    def __call__(self, parts: Sequence[Part], *, alone: bool = False) -> None:
        """All of them."""
        if self._kernel is None:
            for part in parts:
                make_sum(part.sources, self._device, part.shift)(part.total, part.present)
            return
        numbers = [{rank: number for number, rank in enumerate(part.sources)} for part in parts]
        present = [{number[r]: d for r, d in part.present.items()} for part, number in zip(parts, numbers, strict=True)]
        sources = [list(part.sources.values()) for part in parts]
        self._kernel([part.total for part in parts], sources, [part.shift for part in parts], present, alone)


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
