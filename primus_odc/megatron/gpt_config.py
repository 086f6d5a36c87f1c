"""From the Megatron keys of an experiment file to what megatron-core's GPTModel is built from.

The keys are Megatron's own and an absent key has Megatron's own default, so that one file means one model whether Primus or the
standalone trainer reads it. Megatron's defaults include dropout of 0.1, tied embeddings and learned positions; a file that wants something
else says so. Everything the standalone model cannot do is refused here, all of it at once.

Only semantics are read. Keys that choose an implementation of the same arithmetic (`bias_swiglu_fusion`, `transformer_impl`,
`masked_softmax_fusion`, ...) have no effect: the standalone model is always megatron-core's local one, without TransformerEngine and Apex.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from primus_odc.errors import ConfigError

_ONE_AXIS = "FSDP2 over the data-parallel ranks is the only way this model is split"
_ONE_BLOCK = "only the dense transformer block is built here"
_ONE_DTYPE = "fp32, or bf16 parameters with fp32 master weights (bf16: true), are supported"
_DROPOUT = "which numbers it draws depends on the rank and microbatch a sample lands in, so no two plans would compute the same gradient"

# key -> (what Megatron takes when the key is absent, accepted values, why nothing else)
_FIXED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "tensor_model_parallel_size": (1, (1,), _ONE_AXIS),
    "pipeline_model_parallel_size": (1, (1,), _ONE_AXIS),
    "context_parallel_size": (1, (1,), _ONE_AXIS),
    "expert_model_parallel_size": (1, (1,), _ONE_AXIS),
    "expert_tensor_parallel_size": (None, (None, 1), _ONE_AXIS),
    "untie_embeddings_and_output_weights": (False, (True,), "FSDP2 cannot share one weight between two modules"),
    "hidden_dropout": (0.1, (0.0,), _DROPOUT),
    "attention_dropout": (0.1, (0.0,), _DROPOUT),
    "fp16": (False, (False,), _ONE_DTYPE),
    "fp8": (None, (None, False), _ONE_DTYPE),
    "fp4": (None, (None, False), _ONE_DTYPE),
    "fp32_residual_connection": (False, (False,), _ONE_DTYPE),
    "num_experts": (None, (None, 0), _ONE_BLOCK),
    "mtp_num_layers": (None, (None, 0), _ONE_BLOCK),
    "multi_latent_attention": (False, (False,), _ONE_BLOCK),
    "experimental_attention_variant": (None, (None,), _ONE_BLOCK),
    "linear_attention_freq": (None, (None,), _ONE_BLOCK),
    "apply_residual_connection_post_layernorm": (False, (False,), _ONE_BLOCK),
    "squared_relu": (False, (False,), "swiglu: true or plain GELU is built here"),
    "quick_geglu": (False, (False,), "swiglu: true or plain GELU is built here"),
    "openai_gelu": (False, (False,), "swiglu: true or plain GELU is built here"),
    "qk_layernorm": (False, (False,), "the packed attention takes queries and keys as they are projected"),
    "qk_l2_norm": (False, (False,), "the packed attention takes queries and keys as they are projected"),
    "attention_output_gate": (False, (False,), "the packed attention has no output gate"),
    "window_size": (None, (None,), "the packed attention is causal over the whole sample"),
    "softmax_type": ("vanilla", ("vanilla",), "the packed attention has the usual softmax"),
    "attn_logit_softcapping": (None, (None,), "the packed attention has the usual softmax"),
    "final_logit_softcapping": (None, (None,), "the loss is the usual cross entropy"),
    "apply_layernorm_1p": (False, (False,), "torch's norms are not centred at one"),
    "rotary_interleaved": (False, (False,), "rotary positions turn the two halves of a head"),
    "use_rope_scaling": (False, (False,), "rotary positions are unscaled; rotary_seq_len_interpolation_factor is supported"),
    "no_rope_freq": (None, (None,), "rotary positions are applied in every layer"),
    "init_method_xavier_uniform": (False, (False,), "weights are drawn from a normal distribution of init_method_std"),
    "distribute_saved_activations": (False, (False, None), _ONE_AXIS),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class GptConfig:
    """A checked model description."""

    transformer: TransformerConfig
    """What megatron-core's modules are built from. Its recompute_granularity stays None: Megatron's own recomputation needs CUDA."""
    vocab_size: int
    """Rows of the embedding and of the head; not padded."""
    max_positions: int
    """Rows of the table of learned positions; without meaning for rope."""
    position_embedding_type: Literal["rope", "learned_absolute"]
    """Rotary angles, or a learned vector for each position, counted from the start of each sample."""
    rotary_base: int
    """Base period of the rotary angles."""
    rotary_percent: float
    """Part of each head that is turned."""
    rotary_interpolation: float | None
    """Positions are divided by this number before they become angles."""
    seed: int
    """Seed of the initial weights."""
    recomputed_layers: int
    """The first so many layers keep only their input and recompute the rest in backward."""
    recompute_core_attention: bool
    """Keep only query, key and value of the attention and recompute it in backward."""


class _Keys:
    """Reads typed values out of a mapping and gathers what is wrong with them."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = params
        self.problems: list[str] = []

    def number(self, key: str, default: float | None = None, *, kind: type[int] | type[float] = int, above: float = 0) -> Any:
        value = self.params.get(key, default)
        if value is None:
            self.problems.append(f"{key} is missing: a number above {above} is needed")
            return kind(1)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or kind(value) != value or value <= above:
            hint = f"; YAML reads {value} as text, write {_with_a_point(value)}" if _spells_a_number(value) else ""
            self.problems.append(f"{key}: {value!r} is not {'a whole number' if kind is int else 'a number'} above {above}{hint}")
            return kind(1)
        return kind(value)

    def optional(self, key: str, kind: type[int] | type[float] = int) -> Any:
        return None if self.params.get(key) is None else self.number(key, kind=kind)

    def flag(self, key: str, default: bool) -> bool:
        value = self.params.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key}: {value!r} is neither true nor false")
        return bool(value)

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> Any:
        value = self.params.get(key, default)
        if value not in allowed:
            self.problems.append(f"{key}: {value!r} is not supported here; supported: {', '.join(allowed)}")
        return value


def _spells_a_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value) is not None


def _with_a_point(value: str) -> str:
    return re.sub(r"(?=[eE])", ".0", value)


def _norm_epsilon(keys: _Keys) -> float:
    # Primus' presets say norm_epsilon; Megatron stores the value of --norm-epsilon as layernorm_epsilon, so a file may need both.
    given = [key for key in ("norm_epsilon", "layernorm_epsilon") if keys.params.get(key) is not None]
    values = {keys.number(key, kind=float) for key in given}
    if len(values) > 1:
        keys.problems.append(f"norm_epsilon and layernorm_epsilon are one setting but differ: {sorted(values)}")
    return float(next(iter(values), 1e-5))


def _query_groups(keys: _Keys, heads: int) -> int:
    if not keys.flag("group_query_attention", False):
        if keys.params.get("num_query_groups") not in (None, 1, heads):
            keys.problems.append("num_query_groups has no effect without group_query_attention: true; set that, or leave it out")
        return heads
    groups: int = heads if keys.params.get("num_query_groups", 1) is None else keys.number("num_query_groups", 1)
    if heads % groups:
        keys.problems.append(f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups})")
    return groups


def _recompute(keys: _Keys, layers: int) -> tuple[int, bool]:
    """(layers recomputed in full, whether the core attention is recomputed)."""
    granularity = keys.params.get("recompute_granularity")
    if granularity is None or granularity is False:
        granularity = "none"
    if granularity == "none" and keys.flag("recompute_activations", False):
        granularity = "selective"
    if granularity == "full":
        count: int = keys.number("recompute_num_layers")
        if keys.choice("recompute_method", "", ("uniform", "block")) == "block":
            return min(count, layers), False
        if count != 1:
            keys.problems.append(
                f"recompute_num_layers: {count} with recompute_method: uniform would recompute across FSDP2 units; "
                "use 1, or recompute_method: block"
            )
        return layers, False
    if granularity == "selective":
        modules = keys.params.get("recompute_modules")
        if modules is not None and modules != ["core_attn"]:
            keys.problems.append(f"recompute_modules: {modules!r} is not supported here; supported: ['core_attn']")
        return 0, True
    if granularity != "none":
        keys.problems.append(f"recompute_granularity: {granularity!r} is not supported here; supported: none, full, selective")
    return 0, False


def gpt_config(params: Mapping[str, Any], vocab_size: int) -> GptConfig:
    """Read a model description out of the flat keys of a trainer module.

    Raises:
        ConfigError: with one sentence for each key that is missing, wrong or asks for something this model cannot do.
    """
    keys = _Keys(params)
    for key, (default, accepted, reason) in _FIXED.items():
        value = params.get(key, default)
        if value not in accepted:
            absent = "" if key in params else " (Megatron's default, because the key is absent)"
            keys.problems.append(f"{key}: {value!r}{absent} is not supported here; set it to {json.dumps(accepted[0])}: {reason}")
    if vocab_size < 1:
        keys.problems.append(f"the vocabulary size is {vocab_size}; it must be at least 1")
    layers, hidden, heads = keys.number("num_layers"), keys.number("hidden_size"), keys.number("num_attention_heads")
    swiglu = keys.flag("swiglu", False)
    channels = keys.optional("kv_channels") or hidden // heads
    if params.get("kv_channels") is None and hidden % heads:
        keys.problems.append(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}), or kv_channels must be set")
    position = keys.choice("position_embedding_type", "learned_absolute", ("rope", "learned_absolute"))
    percent = keys.number("rotary_percent", 1.0, kind=float)
    if position == "rope" and (percent > 1 or int(channels * percent) % 2):
        keys.problems.append(f"rotary_percent: {percent} of kv_channels ({channels}) must be an even number of at most kv_channels")
    recomputed_layers, recompute_core_attention = _recompute(keys, layers)
    arguments: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": _query_groups(keys, heads),
        "kv_channels": channels,
        "ffn_hidden_size": keys.optional("ffn_hidden_size") or (hidden * 8 // 3 // 64 * 64 if swiglu else 4 * hidden),
        "normalization": keys.choice("normalization", "LayerNorm", ("RMSNorm", "LayerNorm")),
        "layernorm_epsilon": _norm_epsilon(keys),
        "add_bias_linear": keys.flag("add_bias_linear", True),
        "add_qkv_bias": keys.flag("add_qkv_bias", False),
        "softmax_scale": keys.optional("softmax_scale", float),
        "init_method_std": keys.number("init_method_std", 0.02, kind=float),
        "embedding_init_method_std": keys.optional("embedding_init_method_std", float),
    }
    config = {
        "vocab_size": vocab_size,
        "max_positions": keys.optional("max_position_embeddings") or keys.number("seq_length"),
        "position_embedding_type": position,
        "rotary_base": keys.number("rotary_base", 10000),
        "rotary_percent": percent,
        "rotary_interpolation": keys.optional("rotary_seq_len_interpolation_factor", float),
        "seed": keys.number("seed", 1234, above=-1),
        "recomputed_layers": recomputed_layers,
        "recompute_core_attention": recompute_core_attention,
    }
    if keys.problems:
        raise ConfigError(keys.problems)
    transformer = TransformerConfig(
        **arguments,
        gated_linear_unit=swiglu,
        activation_func=F.silu if swiglu else F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],  # its default is a deprecated spelling of this
    )
    return GptConfig(transformer=transformer, **config)
