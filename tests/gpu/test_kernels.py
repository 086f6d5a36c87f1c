"""The pull-sum kernel against plain torch, bit for bit: it adds the same numbers in the same order."""

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
            kernel(total, present)
            expected = torch.zeros(size, dtype=dtype, device="cuda")
            for s in present:
                expected += sources[s]
            assert torch.equal(total, expected), (size, present)
