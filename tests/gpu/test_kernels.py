"""The kernels against plain torch, bit for bit: it adds the same numbers in the same order."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.models import require_gpus

SIZES = [1, 2, 3, 4095, 4096, 4097, 65 * 4096 + 5, 1 << 22]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_sum_is_that_of_torch_in_the_same_order(offset: int, dtype: torch.dtype) -> None:
    require_gpus(1)
    from primus_odc.primitives.kernels import PullSum

    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        buffers = [torch.randn(size + offset, generator=generator, dtype=dtype).cuda() for _ in range(5)]
        sources = [b[offset:] for b in buffers]  # offset 1: not aligned to 16 bytes
        kernel = PullSum(sources)
        for present in ([0, 1, 2, 3, 4], [3], [1, 4], []):
            total = torch.full((size,), float("nan"), dtype=dtype, device="cuda")
            kernel(total, present, alone=size % 2 == 0)
            expected = torch.zeros(size, dtype=dtype, device="cuda")
            for s in present:
                expected += sources[s]
            assert torch.equal(total, expected), (size, present)


@pytest.mark.parametrize(
    ("source_dtype", "target_dtype"),
    [(s, t) for t in (torch.float32, torch.float64) for s in (torch.bfloat16, torch.float16, torch.float32, t)],
)
def test_an_accumulation_is_that_of_torch_bit_for_bit(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    require_gpus(1)
    from primus_odc.primitives.sums import add_into

    generator = torch.Generator().manual_seed(0)
    for rows, columns, offset in ((1, 1, 0), (3, 5, 1), (2, 4096, 0), (2, 4097, 3), (4, 3 * 4096 + 7, 16), (2, 1 << 20, 0)):
        wide = torch.randn(rows, columns + offset + 5, generator=generator, dtype=target_dtype).cuda()
        source = torch.randn(rows, columns + 2 * offset, generator=generator).to(source_dtype).cuda()[:, offset : offset + columns]
        for fresh in (True, False):
            for alone in (True, False):
                target, expected = (wide.clone()[:, offset : offset + columns] for _ in range(2))
                add_into(target, source, fresh=fresh, alone=alone)
                expected.copy_(source) if fresh else expected.add_(source)
                assert torch.equal(target, expected), (rows, columns, fresh)
        flat = torch.zeros(rows * columns, dtype=target_dtype, device="cuda")
        add_into(flat, source.reshape(-1), fresh=False)
        assert torch.equal(flat, source.reshape(-1).to(target_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_small_sums_in_one_launch_are_those_of_torch(dtype: torch.dtype) -> None:
    require_gpus(1)
    from primus_odc.primitives.kernels import PullSums

    generator = torch.Generator().manual_seed(0)
    kernel = PullSums()
    sizes = [1, 4097, 0, 3 * 4096, 70001]
    for _ in range(2):  # the second time from the table of the first
        sources = [[torch.randn(size + 1, generator=generator, dtype=dtype).cuda()[1:] for _ in range(3)] for size in sizes]
        totals = [torch.full((size,), float("nan"), dtype=dtype, device="cuda") for size in sizes]
        present = [[0, 1, 2], [2], [0], [], [0, 2]]
        kernel(totals, sources, present)
        for total, slices, numbers in zip(totals, sources, present, strict=True):
            expected = torch.zeros_like(total)
            for s in numbers:
                expected += slices[s]
            assert torch.equal(total, expected)
