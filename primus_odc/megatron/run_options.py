"""A checked experiment, and everything that can be found wrong with one before a process group exists: told at once.

Nothing here imports torch or megatron-core, except :meth:`RunOptions.of`, which needs both for the model's keys.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from primus_odc._config_values import describe
from primus_odc._problems import Problems
from primus_odc.config import Arm, OdcConfig, ParsedComm, parse_odc
from primus_odc.data.build import build_tokenizer, check_data
from primus_odc.data.enough import require_samples
from primus_odc.errors import ConfigError
from primus_odc.experiment import Experiment
from primus_odc.megatron.schedule import schedule
from primus_odc.megatron.train_config import TrainConfig, parse_train
from primus_odc.megatron.train_keys import check_keys
from primus_odc.planning import CostModel, Policy
from primus_odc.planning.simulate import ARM_POLICY
from primus_odc.versions import require_standalone

Further = Callable[[Problems, ParsedComm | None, TrainConfig | None], None]
"""Adds to the problems; communication and run are None where something is wrong with them."""


def policy_of(arm: Arm) -> Policy:
    """How an arm plans its minibatches.

    Raises:
        ConfigError: ``stock``, that is, no ``comm_backend``.
    """
    if arm == "stock":
        raise ConfigError(["comm_backend is not set: choose nccl_pad (collectives), odc_pad or odc_nopad (on demand)"])
    return ARM_POLICY[arm]


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """A checked experiment."""

    experiment: Experiment
    params: dict[str, Any]
    """Of the trainer module, normalised."""
    train: TrainConfig
    comm: ParsedComm
    max_tokens: int
    """Most tokens of one microbatch."""
    cost_model: CostModel

    @classmethod
    def of(cls, experiment: Experiment, params: dict[str, Any], further: Further | None = None) -> RunOptions:
        """Check everything that can be checked before any process group exists and any sample is read.

        Args:
            experiment: the file.
            params: of its trainer module, normalised.
            further: checks whose problems are told along.

        Raises:
            ConfigError: all that is wrong with keys, values, their combinations, and the files and packages that they name.
        """
        problems, comm, train = check_all_but_model(experiment, params)
        gpt_config = importlib.import_module("primus_odc.megatron.gpt_config").gpt_config
        described = problems.of(lambda: gpt_config(params, vocab_size=1))
        problems.of(lambda: _require_devices(params.get("distributed_backend", "nccl")))
        if described is not None and comm is not None:
            problems.of(lambda: _require_positions(described, comm, params))
        if comm is not None and comm.arm.startswith("odc"):
            problems.of(lambda: _require_transport(comm, params.get("distributed_backend", "nccl")))
        if further is not None:
            further(problems, comm, train)
        problems.raise_any()
        assert comm is not None and train is not None and described is not None
        return cls(
            experiment=experiment,
            params=params,
            train=train,
            comm=comm,
            max_tokens=cap_of(comm, params),
            cost_model=cost_model_of(comm.odc, lambda: described_layers(described)),
        )


def vocabulary_rows(params: Mapping[str, Any], train: TrainConfig) -> int:
    """Rows of embedding and head of every model of an experiment: the tokenizer's, padded.

    Raises:
        ConfigError, DataError: as :func:`primus_odc.data.build.build_tokenizer`.
    """
    return train.padded_vocab_size(build_tokenizer(params).vocab_size)


def require_checked(experiment: Experiment, params: dict[str, Any]) -> None:
    """The checks of :meth:`RunOptions.of`, and that there are samples for a step; those of the model, which need torch, only where there is
    something to tell anyway.

    Raises:
        ConfigError: as :meth:`RunOptions.of`.
    """

    def enough(problems: Problems, comm: ParsedComm | None, train: TrainConfig | None) -> None:
        if train is not None:
            problems.of(lambda: require_samples(params, train.global_batch_size, evaluates=False))

    problems, comm, train = check_all_but_model(experiment, params)
    enough(problems, comm, train)
    if problems.found:
        require_standalone()  # and no warning of megatron-core's import above what is told
        RunOptions.of(experiment, params, enough)


def check_all_but_model(experiment: Experiment, params: Mapping[str, Any]) -> tuple[Problems, ParsedComm | None, TrainConfig | None]:
    """What is wrong beside the model's keys, without torch; the communication and the run are None where something is wrong with them."""
    problems = Problems()
    comm = problems.of(lambda: parse_odc(params))
    if comm is not None:
        problems.of(lambda: policy_of(comm.arm))
        problems.of(lambda: cap_of(comm, params))
    train = problems.of(lambda: parse_train(params))
    problems.of(lambda: schedule(params))
    problems.of(lambda: check_data(params))
    if experiment.self_contained:
        problems.of(lambda: check_keys(params))
    problems.of(lambda: _require_megatron(experiment))
    return problems, comm, train


def _require_megatron(experiment: Experiment) -> None:
    if experiment.framework != "megatron":
        module = f"modules.{experiment.module_name}.framework"
        raise ConfigError([f"{module} is {describe(experiment.framework)}; the standalone trainer trains Megatron's GPT: set megatron"])


def missing_gpus(needed: int, found: int) -> tuple[str, str]:
    """(what ``needed`` processes of this host lack where torch sees ``found`` GPUs, advice to go before any other)"""
    who = f"each of {needed} processes" if needed > 1 else "the one process"
    fewer = "start fewer (GPUS_PER_NODE), or " if found else ""  # without any GPU fewer processes would not do either
    return f"needs a GPU for {who} of this host and torch sees {found}", fewer


def _require_devices(backend: Any) -> None:
    """A GPU for every process that the launcher started on this host, where GPUs are used."""
    if backend != "nccl":
        return
    found, needed = importlib.import_module("torch").cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found < needed:
        lack, fewer = missing_gpus(needed, found)
        raise ConfigError([f"distributed_backend: nccl {lack}; {fewer}set distributed_backend: gloo to train on the CPU"])


def _require_positions(described: Any, comm: ParsedComm, params: Mapping[str, Any]) -> None:
    """A learned position for every token of the longest sample. Rotary positions are computed, so there ``max_position_embeddings`` says
    nothing."""
    cap = cap_of(comm, params)
    if described.position_embedding_type == "learned_absolute" and described.max_positions < cap:
        raise ConfigError(
            [
                f"max_position_embeddings: {described.max_positions} learned positions are fewer than the {cap} tokens a sample may have "
                "(odc.max_tokens_per_microbatch, else seq_length); set it to at least that, or position_embedding_type: rope"
            ]
        )


def _require_transport(comm: ParsedComm, backend: Any) -> None:
    """``odc.transport`` must reach the tensors that this trainer will have."""
    resolve = importlib.import_module("primus_odc.fsdp.choices").resolve_transport
    resolve(comm.odc, "cpu" if backend == "gloo" else "cuda")


def cap_of(comm: ParsedComm, params: Mapping[str, Any]) -> int:
    """The most tokens of a microbatch."""
    cap = comm.odc.max_tokens_per_microbatch or params.get("seq_length")
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
        given = "is missing" if cap is None else f"is {describe(cap)}"
        raise ConfigError([f"seq_length {given}; it must be a whole number of at least 1, being the most tokens of a microbatch"])
    return cap


Layers = tuple[Any, bool, bool]
"""What costs depend on: a shape with Megatron's names (a TransformerConfig, or Megatron's arguments), whether its MLP is gated, and whether
all layers are recomputed."""


def described_layers(described: Any) -> Layers:
    """Those of the model that ``gpt_config`` described."""
    shape = described.transformer
    return shape, shape.gated_linear_unit, described.recomputed_layers == shape.num_layers


def cost_model_of(odc: OdcConfig, layers: Callable[[], Layers]) -> CostModel:
    """``odc.cost_model`` and ``odc.microbatch_cost``; ``attention`` asks for the model's ``layers`` and counts their FLOPs, its head left
    out: only target positions reach it."""
    if odc.cost_model != "attention":
        return CostModel.from_config(odc.cost_model, microbatch_cost=odc.microbatch_cost)
    shape, gated_mlp, recompute = layers()
    return CostModel.from_model_shape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size or 4 * shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups or shape.num_attention_heads,
        vocab_size=0,
        kv_channels=shape.kv_channels,
        gated_mlp=gated_mlp,
        recompute=recompute,
        microbatch_cost=odc.microbatch_cost,
    )
