"""The settle's sum over all sources: one kernel that reads every source's slice through its mapping and writes the total.

The grid is small and persistent: the rest of the device belongs to the backward pass that runs meanwhile. The order of the sources is
fixed, so the sum is reproducible bit for bit; it is that of :func:`primus_odc.primitives.reference.sum_sources`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 64
"""Enough to fill the links (measured: 64 programs 307 GB/s, a full grid 272), few enough to leave the compute alone."""
_BLOCK = 4096


@triton.jit
def _pull_sum(  # type: ignore[no-untyped-def]  # Triton's own language
    total, table, present, numel, SOURCES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < numel
        value = tl.zeros([BLOCK], dtype=total.dtype.element_ty)
        for s in tl.static_range(SOURCES):
            if (present >> s) & 1:
                source = tl.load(table + s).to(tl.pointer_type(total.dtype.element_ty))
                if ALIGNED:
                    source = tl.multiple_of(source, 16)
                value += tl.load(source + offsets, mask=mask)
        tl.store(total + offsets, value, mask=mask)


class PullSum:
    """The pull of one group: ``sources`` are the slices of this rank's shard at every rank, all of one dtype and size."""

    def __init__(self, sources: list[torch.Tensor]) -> None:
        if len(sources) > 63:
            raise ValueError(f"{len(sources)} sources: the kernel serves up to 63 ranks of one node")
        self._table = torch.tensor([s.data_ptr() for s in sources], dtype=torch.int64, device=sources[0].device)
        self._aligned = all(s.data_ptr() % 16 == 0 for s in sources)
        self._sources = len(sources)

    def __call__(self, total: torch.Tensor, present: list[int]) -> None:
        """``total`` := the sum over the sources numbered in ``present``, in the order of their numbers; zeros for none. On the current
        stream."""
        mask = sum(1 << s for s in present)
        programs = min(PROGRAMS, triton.cdiv(total.numel(), _BLOCK))
        if programs:
            _pull_sum[(programs,)](
                total, self._table, mask, total.numel(), SOURCES=self._sources, ALIGNED=self._aligned, BLOCK=_BLOCK, num_warps=8
            )
