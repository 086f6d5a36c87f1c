"""Megatron's local transformer layer with packed attention, found by Megatron through its own key ``spec``.

Megatron imports this module when it builds the model, so its arguments are there; :data:`LAYER` is made from them.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args

from primus_odc.megatron.attention import PackedAttention


def packed_layer(args: Any) -> ModuleSpec:
    """The layer spec for Megatron's arguments; everything but the core attention is Megatron's."""
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


LAYER = packed_layer(get_args())
