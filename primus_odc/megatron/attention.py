"""Packed causal attention and rotary angles for megatron-core, on any device.

Samples packed into one microbatch never see each other, so the result of a sample does not depend on what it was packed with. Which
kernel runs follows from device and dtype alone (:func:`kernel_of`) and is never replaced by another one when it fails:

==============================  ===========================================================================================
NVIDIA GPU, bf16 and fp16       ``varlen``: torch's variable-length flash attention, one call for all samples of a microbatch
anything else                   ``sdpa``: torch's ``scaled_dot_product_attention``, one call for each sample
==============================  ===========================================================================================

Anything else is the CPU, fp32 and fp64 (flash attention has no such kernels), and AMD GPUs, where torch's variable-length attention has
not been tried with this package. Both give the same gradients twice under ``torch.use_deterministic_algorithms(True)``; with
``warn_only=True`` flash attention's backward stays non-deterministic.

:class:`PackedAttention` takes the place of Megatron's core attention through a ModuleSpec; :class:`PackedRotaryEmbedding` takes the place
of `GPTModel.rotary_pos_emb`, which on the first forward would move itself to a CUDA device.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from primus_odc.errors import UnsupportedModelError
from primus_odc.megatron.microbatch import PackedSamples

# torch 2.11 takes any number of key heads that divides the query heads; later versions want to be told.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def kernel_of(device_type: str, dtype: torch.dtype, *, rocm: bool = torch.version.hip is not None) -> Literal["varlen", "sdpa"]:
    """The attention kernel of tensors on such a device; see the table at the top of this module."""
    return "varlen" if device_type == "cuda" and not rocm and dtype in (torch.bfloat16, torch.float16) else "sdpa"


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: PackedSamples, scale: float | None = None) -> torch.Tensor:
    """Causal attention inside each packed sample.

    Args:
        query: [T, heads, d]. Head i reads key head i // (heads / groups), which are not copied out to all heads.
        key: [T, groups, d]
        value: [T, groups, d]
        samples: where they begin and end, T tokens in all; nothing in it is read back from the device.
        scale: factor of the scores; None means 1 / sqrt(d).

    Returns:
        [T, heads, d]

    Raises:
        UnsupportedModelError: a head size that the kernel does not have.
    """
    if kernel_of(query.device.type, query.dtype) == "varlen":
        if query.shape[2] % 8 or query.shape[2] > 256:
            raise UnsupportedModelError(
                f"kv_channels: {query.shape[2]} channels a head; flash attention on GPUs takes multiples of 8 up to 256: choose another "
                "number, or train in fp32"
            )
        borders, longest = samples.device_cu_seqlens, samples.max_seqlen_q
        out = varlen_attn(query, key, value, borders, borders, longest, longest, scale=scale, window_size=(-1, 0), **_GROUPED)
        assert isinstance(out, torch.Tensor)
        return out
    return attend_by_sample(query, key, value, samples.lengths, scale)


def attend_by_sample(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scale: float | None = None
) -> torch.Tensor:
    """:func:`attend` by one call of scaled_dot_product_attention for each sample; ``lengths`` are their tokens."""
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))  # [1, heads, t, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


class PackedAttention(torch.nn.Module):
    """Megatron's core attention for packed samples (format thd). Has no parameters and no state."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        recompute: bool = False,
    ) -> None:
        """The arguments are Megatron's; `recompute` keeps only the inputs and attends again in backward.

        Raises:
            UnsupportedModelError: attention other than causal self-attention without dropout was asked for.
        """
        super().__init__()
        if attn_mask_type != AttnMaskType.causal or attention_type != "self" or config.attention_dropout:
            raise UnsupportedModelError(
                f"layer {layer_number}: packed attention is causal self-attention without dropout, not {attention_type} attention "
                f"with {attn_mask_type} mask and dropout {config.attention_dropout}"
            )
        self.softmax_scale = softmax_scale
        self.recompute = recompute

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSamples | None = None,
    ) -> torch.Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads, d].

        Raises:
            UnsupportedModelError: the samples are not described by a PackedSamples, or a mask or bias would have to be ignored.
        """
        if not isinstance(packed_seq_params, PackedSamples):
            raise UnsupportedModelError("packed attention needs packed_seq_params to be a primus_odc.megatron.microbatch.PackedSamples")
        if attention_mask is not None or attention_bias is not None:
            raise UnsupportedModelError("packed attention is causal within each sample; it takes neither attention_mask nor attention_bias")
        arguments = (query, key, value, packed_seq_params, self.softmax_scale)
        if self.recompute and torch.is_grad_enabled():
            # No generator state to save: there is no dropout.
            result: torch.Tensor = checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)
            return result
        return attend(*arguments)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles kept on the device they were made for.

    An angle is an fp32 number, position * inverse frequency, in every compute precision, as it is in Megatron itself.
    """

    inv_freq: torch.Tensor
    """fp32 [rotary channels / 2]"""

    def __init__(self, *, device: torch.device, **arguments: Any) -> None:
        """`arguments` are those of Megatron's RotaryEmbedding, without use_cpu_initialization and rotary_interleaved."""
        super().__init__(use_cpu_initialization=True, **arguments)
        self.inv_freq = self.inv_freq.to(device)
        self._angles = torch.empty(0, 1, 1, 2 * self.inv_freq.shape[0], device=device)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """fp32 [max_seq_len, 1, 1, rotary channels]: the angles of positions 0 to max_seq_len - 1."""
        assert packed_seq and offset == 0, "positions of packed samples start at 0"
        if max_seq_len > self._angles.shape[0]:
            half = self.get_freqs_non_repeated(max_seq_len)
            self._angles = torch.cat((half, half), dim=-1)[:, None, None, :]
        # Not a longer table: Megatron takes one with as many rows as tokens for the angles of the packed positions themselves.
        return self._angles[:max_seq_len]
