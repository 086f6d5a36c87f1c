"""What Primus can be asked for and cannot be done with ``comm_backend`` set, found before anything is built.

Everything is checked from the arguments alone, so every rank comes to the same verdict, and all of it is told at once. A key that Primus'
presets carry with a harmless value is accepted with that value; what is absent counts as harmless.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from primus_odc import versions
from primus_odc._config_values import describe, spell
from primus_odc.config import ParsedComm, parse_odc
from primus_odc.data.keys import parse_data
from primus_odc.errors import ConfigError, VersionError

Kind = Literal["sft", "pretrain"]

_FSDP2 = "ODC is a way for FSDP2 to communicate"
_ONE_AXIS = "on-demand communication serves data parallelism alone; other ranks of a model would wait inside forward and backward"
_PLAN = "which samples share a microbatch or a rank would change the objective, and the arms could not be compared"
_COLLECTIVE = "it communicates inside forward or backward, where ranks with different microbatch counts never meet"
_GRADIENTS = "gradients exist once a minibatch, after the last backward"
_UNTESTED = "it was never run together with on-demand communication"
_OFF = (None, False)

# key -> (accepted values, the one to set; why)
_ALWAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_distributed_optimizer": ((False, None), "FSDP2 shards the optimizer already"),
    "use_megatron_fsdp": ((False, None), _FSDP2),
    "use_custom_fsdp": ((False, None), _FSDP2),
    "tensor_model_parallel_size": ((1, None), _ONE_AXIS),
    "pipeline_model_parallel_size": ((1, None), _ONE_AXIS),
    "context_parallel_size": ((1, None), _ONE_AXIS),
    "expert_model_parallel_size": ((1, None), _ONE_AXIS),
    "expert_tensor_parallel_size": ((None, 1), _ONE_AXIS),
    "data_parallel_replicate_degree": ((1, None), _UNTESTED),
    "gradient_accumulation_fusion": ((False, None), "it writes gradients past FSDP2"),
    "delay_wgrad_compute": ((False, None), "it makes gradients after backward, past FSDP2"),
    "fp16": ((False, None), "FSDP2 has no loss scaling here; use bf16"),
    "fp8": (_OFF, f"{_COLLECTIVE} (its scaling factors)"),
    "fp4": (_OFF, f"{_COLLECTIVE} (its scaling factors)"),
    "use_fsdp2_fp8_all_gather": ((False, None), "parameters are gathered as they are, in the compute dtype"),
    "overlap_grad_norm": ((False, None), _GRADIENTS),
    "untie_embeddings_and_output_weights": ((True,), "FSDP2 cannot share one weight between two modules"),
    "ckpt_format": (("torch_dcp", "torch_dist", None), "FSDP2 needs sharded checkpoints"),
    "num_experts": ((None, 0), f"{_PLAN} (auxiliary losses), and global_aux_loss communicates inside forward"),
    "mtp_num_layers": ((None, 0), f"{_PLAN} (the weight of its loss)"),
    "hidden_dropout": ((0.0, None), f"{_PLAN} (which numbers dropout draws)"),
    "attention_dropout": ((0.0, None), f"{_PLAN} (which numbers dropout draws)"),
    "enable_fused_linear_ce": ((False, None), f"{_COLLECTIVE} (it gathers the head by itself)"),
    "sft_sanitize_nan_grads": ((False, None), "it hides wrong gradients"),
    "save_wgrads_interval": ((None,), "FSDP2 has no whole gradients to save"),
    "save_dgrads_interval": ((None,), _UNTESTED),
    "rampup_batch_size": ((None,), "every minibatch has global_batch_size samples"),
    "decrease_batch_size_if_needed": ((False, None), "every minibatch has global_batch_size samples"),
    "train_samples": ((None,), "training is counted in minibatches; set train_iters"),
    "phase_transition_iterations": ((None, []), "the order of the data has no phases"),
    "full_validation": ((False, None), "evaluation runs eval_iters minibatches"),
    "multiple_validation_sets": ((False, None), "there is one validation set"),
    "skip_train": ((False, None), "there would be nothing to communicate"),
    "use_legacy_models": ((False, None), _UNTESTED),
    "perform_rl_step": ((False, None), _UNTESTED),
    "inprocess_restart": ((False, None), _UNTESTED),
    "hybrid_context_parallel": ((False, None), _UNTESTED),
    "overlap_moe_expert_parallel_comm": ((False, None), _COLLECTIVE),
    "enable_cuda_graph": ((False, None), "a graph cannot hold what another rank triggers"),
    "external_cuda_graph": ((False, None), "a graph cannot hold what another rank triggers"),
    "enable_torch_compile": ((False, None), _UNTESTED),
    "warmup_train_steps": ((0, None), "it trains on batches that no plan holds"),
    "use_mup": ((False, None), _UNTESTED),
    "model_type": (("gpt", None), _UNTESTED),
}
_SFT: dict[str, tuple[tuple[Any, ...], str]] = {
    "micro_batch_size": ((1,), "microbatches are packed by tokens, see odc.max_tokens_per_microbatch"),
    "multi_latent_attention": ((False, None), "packed attention takes queries and keys of one width"),
    "experimental_attention_variant": ((None,), "packed attention is plain causal attention"),
    "sft_bridge_compat_inline_bos": ((False, None), "samples are made by primus_odc's own templates"),
}
# With transformer_impl: local, whose own attention knows no packed samples, ours takes its place.
_SFT_LOCAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "apply_rope_fusion": ((False, None), "the fused kernel belongs to TransformerEngine"),
    "spec": ((None,), "packed attention is put in by a layer spec of its own"),
    "heterogeneous_layers_config_path": ((None,), "packed attention is put in by a layer spec of its own"),
    "window_size": ((None,), "packed attention sees the whole sample"),
    "softmax_type": (("vanilla", None), "packed attention has the usual softmax"),
}
_TRANSFORMER_ENGINE = ("apply_rope_fusion", "moe_permute_fusion")
_MASKED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
# Arguments of Megatron's own SFT dataset, which is not used here.
_MEGATRON_SFT_KEYS = ("sft_tokenizer_prompt_format",)
NEEDED_PATCHES = ("megatron.fsdp.torch_fsdp2", "megatron.args.iterations_to_skip_default")
"""Patches of Primus without which a run with FSDP2 is another run or none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Checked:
    """What the arguments say about us, once they are known to be possible."""

    comm: ParsedComm
    max_tokens: int
    """Most tokens of one microbatch."""

    params: dict[str, Any]
    """The arguments as :mod:`primus_odc.data` reads them."""


def find_package(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def check(args: Any, kind: Kind, environment: Mapping[str, str] = os.environ, installed: Callable[[str], bool] = find_package) -> Checked:
    """Refuse what cannot be trained.

    Args:
        args: Megatron's arguments with Primus' and our keys among them.
        kind: which trainer.
        environment: of the process.
        installed: whether a package is there.

    Raises:
        ConfigError: everything that is wrong, each with the key and what to set.
    """
    keys = vars(args)
    params = {key: value for key, value in keys.items() if key not in _MEGATRON_SFT_KEYS}
    problems: list[str] = _versions()
    comm: ParsedComm | None = None
    try:
        comm = parse_odc(keys)
    except ConfigError as error:
        problems += error.problems
    if comm is not None and comm.comm_backend is None:
        problems.append(
            f"comm_backend is not set, but stage is odc_{kind}: choose nccl_pad (collectives), odc_pad or odc_nopad (on demand), "
            f"or set stage: {kind} for Primus' own training"
        )
    if comm is not None and comm.odc.baseline == "zero2":
        problems.append("odc.baseline: zero2 is a baseline of the standalone trainer; with Primus use lb_micro or localsort")
    if not keys.get("use_torch_fsdp2"):
        problems.append(f"use_torch_fsdp2 is {describe(keys.get('use_torch_fsdp2'))}; set it to true: {_FSDP2}")
    problems += _unaccepted(keys, _ALWAYS)
    if kind == "sft":
        problems += _unaccepted(keys, _SFT) + _sft(keys) + _data(params)
    problems += _implementation(keys, kind, installed) + _sizes(keys) + patch_problems(environment)
    if environment.get("FUSED_LINEAR_CE", "0") == "1":
        problems.append(f"the environment variable FUSED_LINEAR_CE is 1; unset it: {_ALWAYS['enable_fused_linear_ce'][1]}")
    if problems:
        raise ConfigError(problems)
    assert comm is not None
    natural = keys["seq_length"] * (keys["micro_batch_size"] if kind == "pretrain" else 1)
    return Checked(comm=comm, max_tokens=comm.odc.max_tokens_per_microbatch or natural, params=params)


def _unaccepted(keys: Mapping[str, Any], table: Mapping[str, tuple[tuple[Any, ...], str]]) -> list[str]:
    return [
        f"{key}: {spell(keys[key])} is not possible with comm_backend; set it to {spell(accepted[0])}: {reason}"
        for key, (accepted, reason) in table.items()
        if key in keys and keys[key] not in accepted
    ]


def _sft(keys: Mapping[str, Any]) -> list[str]:
    problems = []
    implementation = keys.get("transformer_impl")
    if implementation == "local":
        problems += _unaccepted(keys, _SFT_LOCAL)
    elif implementation != "transformer_engine":
        problems.append(f"transformer_impl: {describe(implementation)} has no packed attention; set transformer_engine or local")
    if keys.get("position_embedding_type") not in ("rope", "learned_absolute"):
        problems.append(f"position_embedding_type: {describe(keys.get('position_embedding_type'))} is not possible; set rope")
    if getattr(keys.get("lora") or SimpleNamespace(), "enabled", False):
        problems.append(f"lora.enabled: true is not possible with comm_backend; set it to false: {_UNTESTED}")
    if (keys.get("eval_iters") or 0) > 0 and not keys.get("sft_validation_fraction"):
        problems.append("eval_iters needs validation samples: set sft_validation_fraction above 0, or eval_iters: 0")
    return problems


def _implementation(keys: Mapping[str, Any], kind: Kind, installed: Callable[[str], bool]) -> list[str]:
    """Keys that need TransformerEngine or Apex, and end in a bare assertion or an import error of Megatron's where those are missing."""
    local = keys.get("transformer_impl") == "local"
    problems = []
    if not installed("transformer_engine"):
        off = ", ".join(f"{key}: false" for key in _TRANSFORMER_ENGINE)
        # Packed attention without TransformerEngine refuses the fused kernel for a reason of its own.
        elsewhere = ("apply_rope_fusion",) if local and kind == "sft" else ()
        if keys.get("transformer_impl") == "transformer_engine":
            problems.append(
                "transformer_impl: transformer_engine needs the package transformer_engine, which is not installed: install it, or set "
                f"transformer_impl: local, no_persist_layer_norm: true, {off}"
            )
        else:
            problems += [
                f"{key}: true needs the package transformer_engine, which is not installed; set it to false"
                for key in _TRANSFORMER_ENGINE
                if keys.get(key) is True and key not in elsewhere
            ]
    if local and keys.get("no_persist_layer_norm") is False and (keys.get("normalization") == "RMSNorm" or not installed("apex")):
        problems.append("no_persist_layer_norm: false needs Apex and LayerNorm where transformer_impl is local; set it to true")
    if local and kind == "pretrain" and keys.get("masked_softmax_fusion") is True and not installed(_MASKED_SOFTMAX):
        problems.append(f"masked_softmax_fusion: true needs the kernel {_MASKED_SOFTMAX}, which Primus does not compile; set it to false")
    return problems


def _data(params: Mapping[str, Any]) -> list[str]:
    try:
        parse_data(params)
    except ConfigError as error:
        return list(error.problems)
    return []


def _sizes(keys: Mapping[str, Any]) -> list[str]:
    problems = []
    whole: Callable[[Any], bool] = lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1  # noqa: E731
    for key in ("train_iters", "global_batch_size", "micro_batch_size", "seq_length"):
        if not whole(keys.get(key)):
            problems.append(f"{key} is {describe(keys.get(key))}; it must be a whole number of at least 1")
    problems += _warm_up(keys)
    batch, micro, ranks = keys.get("global_batch_size"), keys.get("micro_batch_size"), keys.get("world_size", 1)
    if problems or batch is None or micro is None:
        return problems
    together = micro * ranks
    if batch % together:
        problems.append(
            f"global_batch_size: {batch} is not a multiple of micro_batch_size x ranks = {together}, by which Megatron counts samples; "
            f"set it to {-(-batch // together) * together}"
        )
    return problems


def _warm_up(keys: Mapping[str, Any]) -> list[str]:
    """Megatron stops at a bare assertion."""
    if any(keys.get(key) for key in ("lr_warmup_fraction", "lr_warmup_samples", "lr_decay_samples")):
        return []
    warm_up, decay = keys.get("lr_warmup_iters") or 0, keys.get("lr_decay_iters") or keys.get("train_iters")
    if isinstance(warm_up, int) and isinstance(decay, int) and warm_up >= decay:
        return [
            f"lr_warmup_iters: {warm_up} is not below lr_decay_iters (else train_iters) = {decay}; set a smaller one, or more iterations"
        ]
    return []


def patch_problems(environment: Mapping[str, str]) -> list[str]:
    """Primus applies only the patches PRIMUS_PATCHES names, and says nothing about the others."""
    value = environment.get("PRIMUS_PATCHES", "").strip()
    if not value or value.lower() == "all":
        return []
    named = [] if value.lower() == "none" else [name.strip() for name in value.split(",")]
    missing = [patch for patch in NEEDED_PATCHES if patch not in named]
    return [f"PRIMUS_PATCHES={value} switches off {', '.join(missing)}, which a run needs: unset it, or name them too"] if missing else []


def _versions() -> list[str]:
    problems = []
    for require in (versions.require_primus, versions.require_megatron, versions.require_fsdp2):
        try:
            require()
        except VersionError as error:
            problems.append(str(error))
    return problems
