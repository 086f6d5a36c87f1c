"""The same GPT once more, in plain torch: the yardstick for packing, attention, loss and gradients.

Written from the definition of the model and not from megatron-core: full score matrices, one sample at a time, no packing, no module, no
checkpointing; every number in `dtype` (fp64). The one thing it shares with Megatron is that a rotary angle is an fp32 number, which is part
of what the model is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primus_odc.data.samples import Sample


def _norm(x: Tensor, w: Mapping[str, Tensor], name: str, params: Mapping[str, Any]) -> Tensor:
    eps = params.get("norm_epsilon", params.get("layernorm_epsilon", 1e-5))
    if params.get("normalization") == "RMSNorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _rotate(x: Tensor, params: Mapping[str, Any]) -> Tensor:
    """x [T, heads, d]: turn the pairs (i, i + rotated / 2) of each head by position * base^(-2 i / rotated)."""
    if params.get("position_embedding_type") != "rope":
        return x
    rotated = int(x.shape[-1] * params.get("rotary_percent", 1.0))
    inverse = 1.0 / (params.get("rotary_base", 10000) ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    position = torch.arange(x.shape[0], dtype=torch.float32) / (params.get("rotary_seq_len_interpolation_factor") or 1)
    angle = (position[:, None] * inverse).to(x.dtype)[:, None, :]
    a, b, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), dim=-1)


def _attention(x: Tensor, w: Mapping[str, Tensor], name: str, params: Mapping[str, Any]) -> Tensor:
    heads = params["num_attention_heads"]
    groups = params["num_query_groups"] if params.get("group_query_attention") else heads
    d = params.get("kv_channels") or params["hidden_size"] // heads
    per_group = heads // groups
    # One block of rows for each group: its query heads, its key, its value.
    qkv = _linear(x, w, f"{name}.linear_qkv").view(len(x), groups, per_group + 2, d)
    q = _rotate(qkv[:, :, :per_group].reshape(len(x), heads, d), params)
    k = _rotate(qkv[:, :, per_group], params)
    v = qkv[:, :, per_group + 1]
    out = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // per_group].T / math.sqrt(d)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        out.append(scores.softmax(-1) @ v[:, head // per_group])
    return _linear(torch.cat(out, dim=-1), w, f"{name}.linear_proj")


def _mlp(x: Tensor, w: Mapping[str, Tensor], name: str, params: Mapping[str, Any]) -> Tensor:
    y = _linear(x, w, f"{name}.linear_fc1")
    if params.get("swiglu"):
        gate, up = y.chunk(2, dim=-1)
        return _linear(gate * gate.sigmoid() * up, w, f"{name}.linear_fc2")
    return _linear(y * 0.5 * (1 + torch.erf(y / math.sqrt(2))), w, f"{name}.linear_fc2")


def reference_hidden(weights: Mapping[str, Tensor], params: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Output of the final norm for one sample. tokens int64 [T] -> [T, hidden size]."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    if params.get("position_embedding_type") != "rope":
        x = x + weights["embedding.position_embeddings.weight"][: len(tokens)]
    for i in range(params["num_layers"]):
        layer = f"decoder.layers.{i}"
        x = x + _attention(_norm(x, weights, f"{layer}.input_layernorm", params), weights, f"{layer}.self_attention", params)
        x = x + _mlp(_norm(x, weights, f"{layer}.pre_mlp_layernorm", params), weights, f"{layer}.mlp", params)
    return _norm(x, weights, "decoder.final_layernorm", params)


def reference_loss_and_gradients(
    state_dict: Mapping[str, Any], params: Mapping[str, Any], samples: Sequence[Sample], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss sum, its gradient for every parameter, and the number of targets, over all samples.

    Args:
        state_dict: of `build_gpt`'s model, full tensors.
        params: the Megatron keys it was built from.
        samples: any number; each is run alone.
        dtype: of everything computed.
    """
    weights = {k: v.detach().to("cpu", dtype).requires_grad_() for k, v in state_dict.items() if isinstance(v, Tensor)}
    total = torch.zeros((), dtype=dtype)
    targets = 0
    for sample in samples:
        tokens = torch.from_numpy(np.asarray(sample.tokens, dtype=np.int64))
        predicted = torch.from_numpy(np.flatnonzero(sample.target_mask))
        logits = reference_hidden(weights, params, tokens)[predicted - 1] @ weights["output_layer.weight"].T
        log_probability = logits - logits.exp().sum(-1, keepdim=True).log()
        total = total - log_probability.gather(1, tokens[predicted, None]).sum()
        targets += len(predicted)
    if total.requires_grad:
        total.backward()
    gradients = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in weights.items()}
    return total.detach(), gradients, targets
