"""What is refused before anything is built, from arguments as Primus hands them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from primus_odc import versions
from primus_odc.errors import ConfigError, VersionError
from primus_odc.primus.refusals import NEEDED_PATCHES, Kind, check

# What Primus' presets and Megatron's defaults give a run that can be trained.
GOOD: dict[str, Any] = {
    "comm_backend": "odc_nopad",
    "odc": SimpleNamespace(timeout_s=60),
    "world_size": 2,
    "use_torch_fsdp2": True,
    "use_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "untie_embeddings_and_output_weights": True,
    "gradient_accumulation_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fp16": False,
    "fp8": None,
    "ckpt_format": "torch_dist",
    "train_iters": 10,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "seq_length": 64,
    "eval_iters": 0,
    "transformer_impl": "local",
    "position_embedding_type": "rope",
    "apply_rope_fusion": False,
    "spec": None,
    "lora": SimpleNamespace(enabled=False),
    "sft_dataset_name": "stdlib",
    "sft_dataset_split": "train",
    "sft_tokenizer_prompt_format": "identity",
    "tokenizer_type": "byte",
    "enable_odc": False,
    "odc_phase": 2,
    "lb_mini_cost_model": "linear",
}


@pytest.fixture(autouse=True)
def _tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "require_primus", lambda: None)


def problems(kind: Kind = "sft", environment: dict[str, str] | None = None, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check(SimpleNamespace(**{**GOOD, **changes}), kind, environment or {})
    return caught.value.problems


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
@pytest.mark.parametrize("backend", ["nccl_pad", "odc_pad", "odc_nopad"])
def test_what_can_be_trained_is_accepted(kind: Kind, backend: str) -> None:
    checked = check(SimpleNamespace(**{**GOOD, "comm_backend": backend}), kind, {"PRIMUS_PATCHES": "all"})
    assert checked.comm.comm_backend == backend
    assert checked.comm.odc.timeout_s == 60
    assert checked.max_tokens == 64


def test_the_cap_is_a_microbatch_of_pretraining_or_what_is_asked_for() -> None:
    pretraining = SimpleNamespace(**{**GOOD, "micro_batch_size": 2})
    assert check(pretraining, "pretrain", {}).max_tokens == 128
    assert check(SimpleNamespace(**{**GOOD, "odc": SimpleNamespace(max_tokens_per_microbatch=256)}), "sft", {}).max_tokens == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comm_backend": None}, "comm_backend is not set, but stage is odc_sft"),
        ({"comm_backend": "odc_nopd"}, "did you mean 'odc_nopad'"),
        ({"odc": SimpleNamespace(transport="rocshm")}, "odc.transport"),
        ({"odc": SimpleNamespace(baseline="zero2"), "comm_backend": "nccl_pad"}, "odc.baseline: zero2"),
        ({"use_torch_fsdp2": False}, "use_torch_fsdp2 is false; set it to true"),
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer: true is not possible with comm_backend; set it to false"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size: 2 is not possible with comm_backend; set it to 1"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: 2"),
        ({"context_parallel_size": 2}, "context_parallel_size: 2"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size: 2"),
        ({"overlap_grad_norm": True}, "overlap_grad_norm: true"),
        ({"num_experts": 8, "moe_router_load_balancing_type": "global_aux_loss"}, "num_experts: 8"),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion: true"),
        ({"fp16": True}, "fp16: true"),
        ({"fp8": "hybrid"}, "fp8: hybrid"),
        ({"enable_fused_linear_ce": True}, "enable_fused_linear_ce: true"),
        ({"hidden_dropout": 0.1}, "hidden_dropout: 0.1"),
        ({"micro_batch_size": 2}, "micro_batch_size: 2"),
        ({"global_batch_size": 7}, "global_batch_size: 7 is not a multiple of micro_batch_size x ranks = 2"),
        ({"seq_length": None}, "seq_length is null"),
        ({"transformer_impl": "inference_optimized"}, "has no packed attention"),
        ({"apply_rope_fusion": True}, "apply_rope_fusion: true"),
        ({"lora": SimpleNamespace(enabled=True)}, "lora.enabled: true"),
        ({"eval_iters": 1}, "eval_iters needs validation samples"),
        ({"sft_conversation_format": "alpaca"}, "sft_conversation_format"),
        ({"tokenizer_type": "NullTokenizer"}, "tokenizer_type"),
        ({"lr_warmup_iters": 10}, "lr_warmup_iters: 10 is not below lr_decay_iters (else train_iters) = 10"),
        ({"moe_permute_fusion": True}, "moe_permute_fusion: true needs the package transformer_engine"),
        ({"no_persist_layer_norm": False, "normalization": "RMSNorm"}, "no_persist_layer_norm: false"),
        (
            {"transformer_impl": "transformer_engine", "moe_permute_fusion": True},
            "not installed: install it, or set transformer_impl: local, no_persist_layer_norm: true, apply_rope_fusion: false, "
            "moe_permute_fusion: false",
        ),
    ],
)
def test_each_reason_alone(changes: dict[str, Any], message: str) -> None:
    found = problems(**changes)
    assert len(found) == 1
    assert message in found[0]


def test_keys_of_the_in_tree_port_are_translated() -> None:
    (found,) = problems(enable_odc=True, enable_odc_lb_mini=True, lb_mini_max_token_len=65536, odc_p2p_backend="rocshmem")
    for part in ("enable_odc: True -> comm_backend", "lb_mini_max_token_len: 65536 -> odc.max_tokens_per_microbatch", "-> odc.transport"):
        assert part in found


@pytest.mark.parametrize(("value", "missing"), [("none", NEEDED_PATCHES), (f"a,{NEEDED_PATCHES[0]}", NEEDED_PATCHES[1:])])
def test_patches_of_primus_must_not_be_switched_off(value: str, missing: tuple[str, ...]) -> None:
    (found,) = problems(environment={"PRIMUS_PATCHES": value})
    assert f"PRIMUS_PATCHES={value} switches off {', '.join(missing)}," in found


def test_everything_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def untested() -> None:
        raise VersionError("primus 99.0 is outside the tested range")

    monkeypatch.setattr(versions, "require_primus", untested)
    found = "\n".join(problems(comm_backend="odc", use_torch_fsdp2=False, fp16=True, global_batch_size=3, sft_dataset_name=None))
    for part in ("primus 99.0", "comm_backend", "use_torch_fsdp2", "fp16", "global_batch_size", "sft_dataset_name"):
        assert part in found


def test_what_only_packing_needs_is_free_in_pretraining() -> None:
    free = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "multi_latent_attention": True,
        "eval_iters": 1,
        "tokenizer_type": "NullTokenizer",
    }
    check(SimpleNamespace(**{**GOOD, **free}), "pretrain", {})


def test_kernels_of_packages_are_asked_for_where_these_are_missing_only() -> None:
    fused = {"transformer_impl": "local", "masked_softmax_fusion": True, "apply_rope_fusion": True, "no_persist_layer_norm": False}
    args = SimpleNamespace(**{**GOOD, **fused, "normalization": "LayerNorm"})
    with pytest.raises(ConfigError) as caught:
        check(args, "pretrain", {}, lambda package: False)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "apply_rope_fusion",
        "no_persist_layer_norm",
        "masked_softmax_fusion",
    ]
    check(args, "pretrain", {}, lambda package: True)
    engine = SimpleNamespace(**{**GOOD, "transformer_impl": "transformer_engine", "apply_rope_fusion": True, "moe_permute_fusion": True})
    check(engine, "sft", {}, lambda package: package == "transformer_engine")
