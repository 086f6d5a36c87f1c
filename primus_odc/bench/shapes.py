"""Models to measure with: Megatron keys of published shapes, and one for machines without an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primus_odc.planning import CostModel

_QWEN2: dict[str, Any] = {
    "group_query_attention": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1.0e-6,
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 1000000,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.02,
    "seq_length": 131072,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "optimizer": "adam",
    "clip_grad": 1.0,
    "bf16": True,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """A model as :func:`primus_odc.megatron.model.build_gpt` takes it."""

    params: Mapping[str, Any]
    vocab_size: int
    length_divisor: int
    """Lengths and caps of the points are divided by it."""

    def with_layers(self, layers: int | None) -> Shape:
        """The same with another number of layers; None: as it is."""
        params = self.params if layers is None else {**self.params, "num_layers": layers}
        return Shape(params=params, vocab_size=self.vocab_size, length_divisor=self.length_divisor)

    def cost_model(self, fixed_tokens: float) -> CostModel:
        """Floating-point operations of a sample; a microbatch costs as much as ``fixed_tokens`` tokens without attention on top."""
        return CostModel.from_model_shape(
            num_layers=self.params["num_layers"],
            hidden_size=self.params["hidden_size"],
            ffn_hidden_size=self.params["ffn_hidden_size"],
            num_attention_heads=self.params["num_attention_heads"],
            num_query_groups=self.params["num_query_groups"],
            vocab_size=self.vocab_size,
            recompute=True,
            microbatch_cost=fixed_tokens,
        )


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, divisor: int = 1, **changed: Any) -> Shape:
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
    }
    return Shape(params={**_QWEN2, **sizes, **changed}, vocab_size=vocab, length_divisor=divisor)


SHAPES: dict[str, Shape] = {
    "qwen2-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936),  # untied: 1.78 B parameters
    "qwen2-7b": _qwen2(28, 3584, 18944, 28, 4, 152064),
    "tiny": _qwen2(4, 64, 160, 4, 2, 257, divisor=64, bf16=False),
}
