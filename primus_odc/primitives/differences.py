"""Whether parameters still are what was published of them: one launch for all, which runs beside the forward pass.

Reads every parameter and what was published of it once, and writes nothing but what it finds. As :mod:`primus_odc.primitives.kernels` the
grid is small and persistent: the rest of the device belongs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from primus_odc.primitives.forms import PROGRAMS, form, room
from primus_odc.primitives.kernels import _load

CHUNK = 1 << 18
"""Elements that a program compares before it looks for more, at most."""
DTYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Of what can be compared."""
Pair = tuple[int, torch.Tensor, torch.Tensor]
"""``(number of the group, parameters [n], what was published of them [n])``, contiguous, on one device."""


@triton.jit
def _differences(  # type: ignore[no-untyped-def]  # Triton's own language
    table, chunks, found, OWN: tl.constexpr, PUBLISHED: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = table + 4 * chunk
        own, published, numel, group = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        differs = tl.zeros([BLOCK], dtype=tl.int32)
        for start in tl.range(0, numel, BLOCK, num_stages=STAGES):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < numel
            ours = _load(own, offsets, mask, OWN, ALIGNED).to(PUBLISHED)
            theirs = _load(published, offsets, mask, PUBLISHED, ALIGNED)
            differs |= ((ours != theirs) & ((ours == ours) | (theirs == theirs))).to(tl.int32)  # no NaN differs from another
        tl.store(found + group, 1, mask=tl.max(differs, 0) != 0)


class Differences:
    """Compares the same ``pairs`` again and again; parameters in their own dtype, one of ``DTYPES``, and cast as publishing casts them."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        rows: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int, int]]] = {}
        for group, own, published in pairs:
            of_kind = rows.setdefault((own.dtype, published.dtype), [])
            for start in range(0, own.numel(), CHUNK):
                places = own.data_ptr() + start * own.itemsize, published.data_ptr() + start * published.itemsize
                of_kind.append((*places, min(CHUNK, own.numel() - start), group))
        self._launches = []
        for kind, chunks in rows.items():
            if chunks:
                host = torch.tensor(chunks, dtype=torch.int64)
                if pairs[0][1].device.type != "cpu":  # an interpreter's
                    host = host.pin_memory()
                aligned = all(place % 16 == 0 for chunk in chunks for place in chunk[:2])
                self._launches.append((kind, host.to(pairs[0][1].device, non_blocking=True), host, aligned))

    def __call__(self, found: torch.Tensor) -> None:
        """``found[group]`` := 1 (uint8) for each group with a difference, the others stay. On the current stream."""
        for (own, published), table, _, aligned in self._launches:
            block, warps, stages = form(1, own.itemsize + published.itemsize, room(table.device, aligned))
            _differences[(min(PROGRAMS, table.shape[0]),)](
                table,
                table.shape[0],
                found,
                OWN=DTYPES[own],
                PUBLISHED=DTYPES[published],
                ALIGNED=aligned,
                STAGES=stages,
                BLOCK=block,
                num_warps=warps,
            )
