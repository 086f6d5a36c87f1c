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
            kernel(total, dict.fromkeys(present), alone=size % 2 == 0)
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
        kernel(totals, sources, [0] * len(sizes), [dict.fromkeys(numbers) for numbers in present])
        for total, slices, numbers in zip(totals, sources, present, strict=True):
            expected = torch.zeros_like(total)
            for s in numbers:
                expected += slices[s]
            assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_sources_that_stayed_narrow_are_summed_as_if_they_were_cast(rows: int, dtype: torch.dtype) -> None:
    """The slice of the last of ``rows`` owners; narrow ones lie in the first half of a buffer of fp32."""
    require_gpus(1)
    from primus_odc.primitives.kernels import PullSum, PullSums

    generator = torch.Generator().manual_seed(0)
    present: dict[int, torch.dtype | None] = {0: None, 1: dtype, 3: dtype, 4: None}
    totals, all_sources, shifts, expected = [], [], [], []
    for size in SIZES:
        buffers = [torch.randn(rows * size, generator=generator).cuda() for _ in range(5)]
        for s, narrow in present.items():
            if narrow is not None:
                buffers[s].view(dtype)[: rows * size].copy_(buffers[s].clone())
        sources, shift = [b[(rows - 1) * size :] for b in buffers], 2 * (rows - 1) * size
        total = torch.full((size,), float("nan"), device="cuda")
        PullSum(sources, shift)(total, present)
        wanted = torch.zeros(size, device="cuda")
        for s, narrow in present.items():
            wanted += sources[s] if narrow is None else buffers[s].view(dtype)[(rows - 1) * size : rows * size].float()
        assert torch.equal(total, wanted), size
        totals.append(torch.full((size,), float("nan"), device="cuda"))
        all_sources.append(sources)
        shifts.append(shift)
        expected.append(wanted)
    PullSums()(totals, all_sources, shifts, [present] * len(SIZES))
    for total, wanted in zip(totals, expected, strict=True):
        assert torch.equal(total, wanted)
    with pytest.raises(ValueError, match="one dtype"):
        PullSum(all_sources[0])(totals[0], {0: torch.bfloat16, 1: torch.float16})
