from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from primus_odc.errors import UnsupportedModelError
from primus_odc.megatron.attention import PackedAttention, PackedRotaryEmbedding, attend, kernel_of
from primus_odc.megatron.microbatch import PackedSamples
from tests.megatron.gpt_cases import CPU, relative_error


def packed(lengths: tuple[int, ...], device: torch.device = CPU) -> PackedSamples:
    return PackedSamples.of(np.cumsum((0, *lengths), dtype=np.int32), device)


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scale: float) -> torch.Tensor:
    """One score matrix over all tokens, with everything but earlier tokens of the same sample masked."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (sample[:, None] == sample[None]) & torch.ones(len(sample), len(sample), dtype=torch.bool).tril()
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    scale=st.sampled_from([None, 0.3]),
)
def test_outputs_and_gradients_follow_the_definition(lengths: tuple[int, ...], heads: tuple[int, int], scale: float | None) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = [
        torch.randn(sum(lengths), n, 8, dtype=torch.float64, generator=generator).requires_grad_() for n in (heads[0], heads[1], heads[1])
    ]
    actual = attend(inputs[0], inputs[1], inputs[2], packed(lengths), scale)
    expected = by_definition(inputs[0], inputs[1], inputs[2], lengths, scale or 1 / math.sqrt(8))
    assert actual.shape == inputs[0].shape
    assert relative_error(actual, expected) < 1e-13
    weights = torch.randn(actual.shape, dtype=torch.float64, generator=generator)
    grads = zip(torch.autograd.grad((actual * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_kernel_follows_from_device_and_dtype(dtype: torch.dtype) -> None:
    assert kernel_of("cpu", dtype) == "sdpa"
    assert kernel_of("cuda", dtype, rocm=True) == "sdpa"
    assert kernel_of("cuda", dtype, rocm=False) == ("varlen" if dtype in (torch.bfloat16, torch.float16) else "sdpa")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("heads", [(12, 12), (12, 2)])
@pytest.mark.parametrize("lengths", [(1,), (300, 1, 77, 129), (4000, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_outputs_and_gradients_follow_the_definition(dtype: torch.dtype, lengths: tuple[int, ...], heads: tuple[int, int]) -> None:
    gpu = torch.device("cuda")
    generator = torch.Generator(device=gpu).manual_seed(0)
    inputs = [torch.randn(sum(lengths), n, 128, device=gpu, generator=generator) for n in (heads[0], heads[1], heads[1])]
    weights = torch.randn(sum(lengths), heads[0], 128, device=gpu, generator=generator)
    rounded = [x.to(dtype).requires_grad_() for x in inputs]
    actual = attend(rounded[0], rounded[1], rounded[2], packed(lengths, gpu))
    grads = torch.autograd.grad((actual * weights).sum(), rounded)
    wide = [x.detach().float().cpu().requires_grad_() for x in rounded]
    expected = attend(wide[0], wide[1], wide[2], packed(lengths))
    expected_grads = torch.autograd.grad((expected * weights.cpu()).sum(), wide)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert actual.dtype == dtype
    assert relative_error(actual.cpu(), expected) < tolerance
    for name, grad, wanted in zip("qkv", grads, expected_grads, strict=True):
        if lengths == (1,) and name != "v":
            # Attending to one token does not depend on the scores: what is left is the rounding of the kernel.
            assert float(grad.abs().max()) < 1e-5, name
        else:
            assert relative_error(grad.cpu(), wanted) < tolerance, name


@needs_gpu
def test_on_a_gpu_deterministic_mode_repeats_itself() -> None:
    gpu, lengths = torch.device("cuda"), (9000, 3000)
    inputs = [torch.randn(12000, n, 128, device=gpu, dtype=torch.bfloat16).requires_grad_() for n in (12, 2, 2)]
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out = attend(inputs[0], inputs[1], inputs[2], packed(lengths, gpu))
            runs.append([out, *torch.autograd.grad(out.float().sum(), inputs)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@needs_gpu
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    gpu, lengths = torch.device("cuda"), (900, 300)
    inputs = [torch.randn(1200, n, 128, device=gpu, dtype=torch.bfloat16).requires_grad_() for n in (12, 2, 2)]
    samples = packed(lengths, gpu)
    attend(inputs[0], inputs[1], inputs[2], samples).sum().backward()  # first use may initialise libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(inputs[0], inputs[1], inputs[2], samples).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_on_a_gpu_another_head_size_is_refused() -> None:
    x = torch.zeros(3, 2, 12, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="kv_channels: 12"):
        attend(x, x, x, packed((3,), torch.device("cuda")))


def build(mask: AttnMaskType = AttnMaskType.causal, dropout: float = 0.0) -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=dropout)
    return PackedAttention(config=config, layer_number=1, attn_mask_type=mask, attention_type="self")


@pytest.mark.parametrize("arguments", [{"mask": AttnMaskType.padding}, {"dropout": 0.1}])
def test_other_attention_is_refused_when_built(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="causal self-attention without dropout"):
        build(**arguments)


def test_nothing_given_is_ignored() -> None:
    x = torch.zeros(3, 2, 4)
    with pytest.raises(UnsupportedModelError, match="PackedSamples"):
        build()(x, x, x, None)


def test_rotary_angles_stay_on_their_device_and_grow() -> None:
    rotary = PackedRotaryEmbedding(device=CPU, kv_channels=8, rotary_percent=1.0, rotary_base=100)
    expected = [[p * 100.0 ** (-2 * i / 8) for i in (0, 1, 2, 3, 0, 1, 2, 3)] for p in range(9)]
    for length in (4, 9, 2):
        angles = rotary(length, packed_seq=True)
        assert angles.shape == (length, 1, 1, 8) and angles.device == CPU and angles.dtype == torch.float32
        torch.testing.assert_close(angles[:, 0, 0], torch.tensor(expected[:length]))
