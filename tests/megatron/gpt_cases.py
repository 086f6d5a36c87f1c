"""Small models and samples for the tests of the Megatron part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from primus_odc.data.samples import Sample
from primus_odc.megatron.model import PackedGPT, build_gpt

CPU = torch.device("cpu")
VOCAB = 97

# Norm weights and biases matter in these shapes, and epsilon is large enough to be seen.
QWEN2: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-2,
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 1000000,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "seq_length": 64,
    "seed": 7,
}
GPT2: dict[str, Any] = {
    **QWEN2,
    "group_query_attention": False,
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "swiglu": False,
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "add_qkv_bias": False,
}
PARTLY_ROTATED: dict[str, Any] = {**QWEN2, "kv_channels": 12, "rotary_percent": 0.5, "rotary_seq_len_interpolation_factor": 2}


def make_model(params: Mapping[str, Any], dtype: torch.dtype = torch.float32, chunk_tokens: int | None = None) -> PackedGPT:
    """A built model, with norms and biases moved away from the ones and zeros they start as."""
    model = build_gpt(params, VOCAB, device=CPU, dtype=dtype, chunk_tokens=chunk_tokens)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def make_samples(lengths: Sequence[int], seed: int = 0, target_fraction: float = 0.6) -> list[Sample]:
    """Random tokens; about `target_fraction` of them are targets."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        mask = rng.random(length) < target_fraction
        mask[0] = False
        samples.append(Sample(sample_id=f"s{i}", tokens=rng.integers(0, VOCAB, length).astype(np.int32), target_mask=mask))
    return samples


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradient of each parameter; all of them must have one."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.detach().clone()
    return found


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; the plain norm of actual where expected is zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / (expected.norm() if expected.norm() > 0 else 1.0))
