from __future__ import annotations

from typing import Any

import pytest

from primus_odc.errors import ConfigError
from primus_odc.megatron.gpt_config import gpt_config
from tests.megatron.gpt_cases import GPT2, QWEN2


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        gpt_config({k: v for k, v in {**QWEN2, **changes}.items() if v != "absent"}, 100)
    return caught.value.problems


def test_a_qwen2_shape() -> None:
    config = gpt_config({**QWEN2, "norm_epsilon": 1e-6}, 100)
    transformer = config.transformer
    assert (transformer.num_query_groups, transformer.kv_channels, transformer.ffn_hidden_size) == (2, 8, 48)
    assert (transformer.normalization, transformer.layernorm_epsilon) == ("RMSNorm", 1e-6)
    assert transformer.gated_linear_unit and transformer.add_qkv_bias and not transformer.add_bias_linear
    assert (config.position_embedding_type, config.rotary_base, config.max_positions) == ("rope", 1000000, 64)


def test_absent_keys_have_megatrons_defaults() -> None:
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    found = problems(**{key: "absent" for key in QWEN2 if key not in needed})
    assert len(found) == 3
    assert any(p.startswith("untie_embeddings_and_output_weights: False (Megatron's default") for p in found)
    assert any(p.startswith("hidden_dropout: 0.1 (Megatron's default") for p in found)
    assert any(p.startswith("attention_dropout: 0.1 (Megatron's default") for p in found)
    plain = gpt_config({k: v for k, v in GPT2.items() if k not in ("ffn_hidden_size", "norm_epsilon", "num_query_groups")}, 100)
    assert plain.transformer.ffn_hidden_size == 128
    assert plain.transformer.layernorm_epsilon == 1e-5
    assert plain.transformer.num_query_groups == 4
    gated = gpt_config({**QWEN2, "hidden_size": 256, "ffn_hidden_size": None}, 100)
    assert gated.transformer.ffn_hidden_size == 640


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: 2 is not supported here; set it to 1"),
        ({"context_parallel_size": 4}, "context_parallel_size: 4"),
        ({"expert_model_parallel_size": 8}, "expert_model_parallel_size: 8"),
        ({"num_experts": 8}, "num_experts: 8 is not supported here; set it to null"),
        (
            {"untie_embeddings_and_output_weights": False},
            "untie_embeddings_and_output_weights: False is not supported here; set it to true",
        ),
        ({"hidden_dropout": 0.2}, "hidden_dropout: 0.2"),
        ({"fp16": True}, "fp16: True"),
        ({"position_embedding_type": "yarn"}, "supported: rope, learned_absolute"),
        ({"normalization": "L2Norm"}, "supported: RMSNorm, LayerNorm"),
        ({"norm_epsilon": "1e-6"}, "write 1.0e-6"),
        ({"layernorm_epsilon": 1e-5}, "one setting but differ"),
        ({"num_layers": "absent"}, "num_layers is missing"),
        ({"num_layers": 2.5}, "num_layers: 2.5 is not a whole number"),
        ({"swiglu": "yes"}, "swiglu: 'yes' is neither true nor false"),
        ({"num_query_groups": 3}, "must be a multiple of num_query_groups (3)"),
        ({"group_query_attention": False}, "num_query_groups has no effect"),
        ({"hidden_size": 30}, "hidden_size (30) must be a multiple"),
        ({"kv_channels": 7}, "must be an even number"),
        ({"recompute_granularity": "full"}, "recompute_num_layers is missing"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, "across FSDP2 units"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "recompute_modules: ['mlp']"),
        ({"recompute_granularity": "selective", "recompute_modules": []}, "recompute_modules: [] is not supported"),
        ({"recompute_granularity": "selective", "recompute_modules": 0}, "recompute_modules: 0 is not supported"),
        ({"recompute_granularity": 0}, "recompute_granularity: 0 is not supported"),
        ({"recompute_granularity": ""}, "recompute_granularity: '' is not supported"),
        ({"recompute_granularity": "all"}, "supported: none, full, selective"),
    ],
)
def test_what_is_refused_and_how(changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in problems(**changes)), problems(**changes)


def test_recomputation() -> None:
    def of(**changes: Any) -> tuple[int, bool]:
        config = gpt_config({**QWEN2, **changes}, 100)
        assert config.transformer.recompute_granularity is None
        return config.recomputed_layers, config.recompute_core_attention

    assert of() == of(recompute_granularity=None) == of(recompute_granularity="none") == (0, False)
    assert of(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) == (2, False)
    assert of(recompute_granularity="full", recompute_method="block", recompute_num_layers=1) == (1, False)
    assert of(recompute_granularity="full", recompute_method="block", recompute_num_layers=9) == (2, False)
    assert of(recompute_granularity="selective") == of(recompute_activations=True) == (0, True)
