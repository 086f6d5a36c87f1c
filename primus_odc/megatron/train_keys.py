"""All keys that a trainer module may hold for the standalone trainer.

In a self-contained module an unknown key is an error with the nearest name, because a misspelt ``train_iters`` would train on something
else than what was written. Keys that Primus and Megatron need and that have no effect here (:data:`IGNORED_KEYS`) may stand in the file. A
key is among them only if no value of it changes what is computed; one that would is refused unless it asks for what this trainer does
anyway (:data:`FIXED`). A module made of Primus' presets carries hundreds of keys of Primus and is not checked for unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_odc._config_keys import IN_TREE_KEYS
from primus_odc._config_values import nearest
from primus_odc.data.keys import DATA_KEYS
from primus_odc.errors import ConfigError

_LOOP_KEYS = (
    "train_iters",
    "global_batch_size",
    "seed",
    "eval_interval",
    "eval_iters",
    "save",
    "load",
    "save_interval",
    "ckpt_step",
    "exit_interval",
    "log_interval",
    "distributed_backend",
    "distributed_timeout_minutes",
    "make_vocab_size_divisible_by",
)
_OPTIMIZER_KEYS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
    "weight_decay",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
_MODEL_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "normalization",
    "norm_epsilon",
    "layernorm_epsilon",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "softmax_scale",
    "init_method_std",
    "embedding_init_method_std",
    "bf16",
    "grad_reduce_in_bf16",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    # refused by the model unless they are off
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "untie_embeddings_and_output_weights",
    "hidden_dropout",
    "attention_dropout",
    "fp16",
    "fp8",
    "fp4",
    "fp32_residual_connection",
    "num_experts",
    "mtp_num_layers",
    "multi_latent_attention",
    "experimental_attention_variant",
    "linear_attention_freq",
    "apply_residual_connection_post_layernorm",
    "squared_relu",
    "quick_geglu",
    "openai_gelu",
    "qk_layernorm",
    "qk_l2_norm",
    "attention_output_gate",
    "window_size",
    "softmax_type",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "apply_layernorm_1p",
    "rotary_interleaved",
    "use_rope_scaling",
    "no_rope_freq",
    "init_method_xavier_uniform",
    "distribute_saved_activations",
)
_COMM_KEYS = ("comm_backend", "odc")

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "calculate_per_token_loss": ((True,), "every target token of a minibatch counts the same here"),
    "use_torch_fsdp2": ((True,), "FSDP2 is the only way this trainer splits a model"),
    "use_distributed_optimizer": ((False,), "FSDP2 shards the optimizer already"),
    "use_megatron_fsdp": ((False,), "FSDP2 is the only way this trainer splits a model"),
    "micro_batch_size": ((1, None), "microbatches are packed by tokens, see odc.max_tokens_per_microbatch"),
    "train_samples": ((None,), "training is counted in minibatches; set train_iters"),
    "rampup_batch_size": ((None,), "every minibatch has global_batch_size samples"),
    "finetune": ((False,), "load continues a run, its data position and optimizer included"),
    "no_load_optim": ((False, None), "load continues a run, its optimizer included"),
    "no_load_rng": ((False, None), "load continues a run, its random numbers included"),
    "no_save_optim": ((False, None), "a checkpoint always holds the optimizer"),
    "no_save_rng": ((False, None), "a checkpoint always holds the random numbers"),
    "skip_train": ((False,), "this trainer trains"),
    "decoupled_lr": ((None,), "all parameters have one learning rate"),
    "lora": ((None, False), "all parameters are trained"),
    "ckpt_format": (("torch_dcp", "torch_dist"), "checkpoints are written by torch.distributed.checkpoint"),
    "optimizer": (("adam",), "adam (that is AdamW) is the only optimizer here"),
}
"""key -> (accepted values, why nothing else); an absent key is accepted."""

IGNORED_KEYS = (
    *IN_TREE_KEYS,  # primus_odc.config answers the ones that ask for something
    "stage",
    "trainable",
    "sft_bridge_compat_inline_bos",
    "sft_sanitize_nan_grads",
    "transformer_impl",
    "gradient_accumulation_fusion",
    "bias_swiglu_fusion",
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "persist_layer_norm",
    "attention_backend",
    "attention_softmax_in_fp32",
    "use_flash_attn",
    "enable_primus_turbo",
    "use_turbo_attention",
    "use_turbo_gemm",
    "use_turbo_rms_norm",
    "enable_packed_sequences",
    "use_packed_attention",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "ddp_average_in_collective",
    "ddp_bucket_size",
    "num_workers",
    "dataloader_type",
    "mock_data",
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "create_attention_mask_in_dataloader",
    "async_save",
    "auto_continue_train",
    "auto_detect_ckpt_format",
    "ckpt_assume_constant_structure",
    "ckpt_fully_parallel_load",
    "ckpt_fully_parallel_save",
    "exit_on_missing_checkpoint",
    "disable_last_saving",
    "manual_gc",
    "manual_gc_interval",
    "manual_gc_eval",
    "check_for_nan_in_loss_and_grad",
    "check_for_spiky_loss",
    "check_for_large_grads",
    "deterministic_mode",
    "use_cpu_initialization",
    "init_model_with_meta_device",
    "log_throughput",
    "log_params_norm",
    "log_num_zeros_in_grad",
    "log_progress",
    "log_avg_skip_iterations",
    "log_avg_reset_interval",
    "logging_level",
    "timing_log_level",
    "timing_log_option",
    "tensorboard_dir",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
    "disable_tensorboard",
    "disable_wandb",
    "disable_mlflow",
    "wandb_project",
    "wandb_exp_name",
    "wandb_entity",
    "wandb_save_dir",
    "profile",
    "profile_ranks",
    "profile_step_start",
    "profile_step_end",
    "use_pytorch_profiler",
    "file_sink_level",
    "stdout_sink_level",
    "stderr_sink_level",
)
"""Keys of Primus and Megatron without an effect on what this trainer computes."""

KNOWN_KEYS = (*_LOOP_KEYS, *_OPTIMIZER_KEYS, *_MODEL_KEYS, *DATA_KEYS, *_COMM_KEYS, *FIXED)

TEXT_KEYS = frozenset((*DATA_KEYS, *_COMM_KEYS, "save", "load")) - {"sft_max_samples", "sft_min_tokens", "sft_validation_fraction"}
"""Known keys whose value is a text even where it spells a number."""


def check_keys(params: Mapping[str, Any]) -> None:
    """Refuse keys of a self-contained module that nothing here reads.

    Raises:
        ConfigError: naming every unknown key with the nearest known one.
    """
    accepted = (*KNOWN_KEYS, *IGNORED_KEYS)
    unknown = [str(key) for key in params if key not in accepted]
    problems = [f"{key} is not known to the standalone trainer, did you mean {nearest(key, accepted)!r}?" for key in unknown]
    if problems:
        raise ConfigError(problems)
