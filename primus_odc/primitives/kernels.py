"""The two sums that run beside backward: the settle's over all sources, and that of one contribution into a running sum.

The grids are small and persistent: the rest of the device belongs to the backward pass that runs meanwhile. An elementwise kernel of
torch's takes the whole device, and what backward launches next waits for it (measured: 0.13 ms a layer). The settle's sum reads every
source's slice through its mapping, in a fixed order, so it is reproducible bit for bit; it is that of
:func:`primus_odc.primitives.reference.settle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from primus_odc.primitives.forms import IN_FLIGHT, PROGRAMS, PROGRAMS_ALONE, PROGRAMS_HERE, form, room


@triton.jit
def _load(place, offsets, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own language
    numbers = place.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 16)
    return tl.load(numbers + offsets, mask=mask, other=0.0)


@triton.jit
def _terms(  # type: ignore[no-untyped-def]  # Triton's own language
    place, shift, offsets, mask, half, DTYPE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr
):
    # What is absent is masked, never branched around: the loads of all sources, and of the blocks to come, are then under way together.
    if NARROW is None:
        terms = _load(place, offsets, mask, DTYPE, ALIGNED)
    else:
        terms = _load(place - shift, offsets, (mask & half) if WIDE else mask, NARROW, ALIGNED).to(DTYPE)
        if WIDE:
            terms += _load(place, offsets, mask & (half == 0), DTYPE, ALIGNED)
    return terms


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]  # Triton's own language
    total,
    places,
    present,
    narrow,
    shift,
    start,
    numel,
    FIRST: tl.constexpr,
    SOURCES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The block that begins at start: sources begin at places[s], and bit FIRST + s of present and narrow is source s.
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < numel
    value = tl.zeros([BLOCK], dtype=total.dtype.element_ty)
    for s in tl.static_range(SOURCES):
        here = mask & (((present >> (FIRST + s)) & 1) != 0)
        half = ((narrow >> (FIRST + s)) & 1) != 0
        value += _terms(tl.load(places + s), shift, offsets, here, half, total.dtype.element_ty, WIDE, NARROW, ALIGNED)
    tl.store(total + offsets, value, mask=mask)


@triton.jit(do_not_specialize=["present", "narrow", "shift"])
def _pull_sum(  # type: ignore[no-untyped-def]  # Triton's own language
    total,
    table,
    present,
    narrow,
    shift,
    numel,
    SOURCES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step, num_stages=STAGES):
        _sum_block(total, table, present, narrow, shift, start, numel, 0, SOURCES, ALIGNED, WIDE, NARROW, BLOCK)


_NARROW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Numbers = Mapping[int, torch.dtype | None]
"""The sources that have something, by number and ascending, and the dtype of what they have; None: that of the sum."""


def _kinds(present: Sequence[Numbers], total: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """What kinds of sources there are: bytes to be read for a number of one of them, and the kernels' constants WIDE and NARROW.

    Raises:
        ValueError: sources that stayed narrow have several dtypes.
    """
    found = [dtype for numbers in present for dtype in numbers.values()]
    narrow = {dtype for dtype in found if dtype is not None}
    if len(narrow) > 1:
        raise ValueError(f"one sum over sources of {sorted(map(str, narrow))}: all ranks must reduce gradients in one dtype")
    wide = None in found or not narrow
    nbytes = (total.element_size() if wide else 0) + (2 if narrow else 0)
    return nbytes, {"WIDE": wide, "NARROW": _NARROW[narrow.pop()] if narrow else None}


class PullSum:
    """The pull of one group: ``sources`` are the slices of this rank's shard at every rank, all of one dtype and size. One that stayed
    narrow begins ``shift`` bytes before. ``here``: all of them are in this device's own memory."""

    def __init__(self, sources: list[torch.Tensor], shift: int = 0, *, here: bool = False) -> None:
        if len(sources) > 63:
            raise ValueError(f"{len(sources)} sources: the kernel serves up to 63 ranks of one node")
        self._table = torch.tensor([s.data_ptr() for s in sources], dtype=torch.int64, device=sources[0].device)
        self._aligned = all(s.data_ptr() % 16 == 0 for s in sources) and shift % 16 == 0
        self._sources = len(sources)
        self._shift = shift
        self._programs_alone = PROGRAMS_HERE if here else PROGRAMS_ALONE
        self._room = room(self._table.device, self._aligned)

    def __call__(self, total: torch.Tensor, present: Numbers, alone: bool = False) -> None:
        """``total`` := the sum over the sources ``present``, in the order of their numbers; zeros for none. On the current stream.

        Raises:
            ValueError: sources of several narrow dtypes.
        """
        mask = sum(1 << s for s in present)
        narrow = sum(1 << s for s, dtype in present.items() if dtype is not None)
        nbytes, kinds = _kinds([present], total)
        block, warps, stages = form(self._sources, nbytes, self._room)
        programs = min(self._programs_alone if alone else PROGRAMS, triton.cdiv(total.numel(), block))
        if programs:
            _pull_sum[(programs,)](
                total,
                self._table,
                mask,
                narrow,
                self._shift,
                total.numel(),
                SOURCES=self._sources,
                ALIGNED=self._aligned,
                STAGES=stages,
                BLOCK=block,
                num_warps=warps,
                **kinds,
            )


@triton.jit(do_not_specialize=["present", "narrow"])
def _pull_sums(  # type: ignore[no-untyped-def]  # Triton's own language
    kind,
    table,
    sizes,
    present,
    narrow,
    GROUPS: tl.constexpr,
    SOURCES: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for g in tl.static_range(GROUPS):
        row = table + g * (SOURCES + 1)
        numel = tl.load(sizes + 2 * g)
        shift = tl.load(sizes + 2 * g + 1)
        total = tl.load(row).to(tl.pointer_type(kind.dtype.element_ty))
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
            _sum_block(total, row + 1, present, narrow, shift, start, numel, g * SOURCES, SOURCES, False, WIDE, NARROW, BLOCK)


class PullSums:
    """The pulls of several small groups in one launch, each with the result of its own :class:`PullSum`."""

    MOST_BITS = 62
    """Groups times sources in one launch."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        totals: list[torch.Tensor],
        sources: list[list[torch.Tensor]],
        shifts: list[int],
        present: list[Numbers],
        alone: bool = False,
    ) -> None:
        """``totals[g]`` := the sum over the sources of group g in ``present[g]``, in the order of their numbers. All of one dtype; as many
        sources for each group.

        Raises:
            ValueError: sources of several narrow dtypes.
        """
        places = tuple(t.data_ptr() for total, slices in zip(totals, sources, strict=True) for t in (total, *slices))
        if places not in self._tables:
            sizes_and_shifts = [number for total, shift in zip(totals, shifts, strict=True) for number in (total.numel(), shift)]
            host = torch.tensor([*places, *sizes_and_shifts], dtype=torch.int64, device="cpu")
            if totals[0].device.type != "cpu":  # an interpreter's
                host = host.pin_memory()
            numbers = host.to(totals[0].device, non_blocking=True)
            self._tables[places] = numbers[: len(places)], numbers[len(places) :], host
        table, sizes, _ = self._tables[places]
        count = len(sources[0])
        bits = {g * count + s: dtype for g, numbers in enumerate(present) for s, dtype in numbers.items()}
        narrow = sum(1 << bit for bit, dtype in bits.items() if dtype is not None)
        nbytes, kinds = _kinds(present, totals[0])
        block, warps, _ = form(count, nbytes, IN_FLIGHT)
        programs = min(PROGRAMS_ALONE if alone else PROGRAMS, triton.cdiv(max(total.numel() for total in totals), block))
        if programs:
            _pull_sums[(programs,)](
                totals[0],
                table,
                sizes,
                sum(1 << bit for bit in bits),
                narrow,
                GROUPS=len(totals),
                SOURCES=count,
                BLOCK=block,
                num_warps=warps,
                **kinds,
            )


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]  # Triton's own language
    target, source, rows, columns, target_stride, source_stride, FRESH: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(columns, BLOCK)
    for number in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=STAGES):
        row = (number // blocks).to(tl.int64)
        offsets = (number % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < columns
        value = tl.load(source + row * source_stride + offsets, mask=mask, other=0.0).to(target.dtype.element_ty)
        place = target + row * target_stride + offsets
        if not FRESH:
            value += tl.load(place, mask=mask, other=0.0)
        tl.store(place, value, mask=mask)


def accumulate(target: torch.Tensor, source: torch.Tensor, fresh: bool, alone: bool = False) -> None:
    """``target`` += ``source``, or := where ``fresh``, cast to the target's dtype; both ``[rows, columns]`` with rows contiguous. On the
    current stream."""
    rows, columns = target.shape
    nbytes = source.element_size() + (0 if fresh else target.element_size())
    block, warps, stages = form(1, nbytes, room(target.device, True))
    programs = min(PROGRAMS_HERE if alone else PROGRAMS, rows * triton.cdiv(columns, block))
    if programs:
        strides = target.stride(0), source.stride(0)
        _accumulate[(programs,)](target, source, rows, columns, *strides, FRESH=fresh, STAGES=stages, BLOCK=block, num_warps=warps)
