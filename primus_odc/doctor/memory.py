"""Stage ``memory``: what the engine will add to a rank's memory, and whether it fits. Runs in the child process: it builds the model.

The model is the standalone trainer's on the meta device, which holds no weights, with the vocabulary that is trained, padding included. Its
units are those that the trainer or, in Primus, Megatron's FSDP2 wrapper makes; sizes follow from the shapes by the rule of
:func:`primus_odc.fsdp.probe.find_units`. Memory counts the rows by which FSDP2 pads the shards, the number of parameters does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from primus_odc._config_values import describe
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.run import Run, describe_run
from primus_odc.doctor.system import GIB
from primus_odc.errors import ConfigError, OdcError
from primus_odc.symmetric.host import available_memory


def check_memory_of_run(job: Job) -> list[Finding]:
    """The bytes the engine adds, for ``auto`` as it would decide with what is free now."""
    try:
        run = describe_run(job)
    except OdcError:
        return []  # stage `run` tells what is wrong
    if not run.on_demand:
        return []
    try:
        groups, parameters = find_groups(run, job.world())
    except OdcError as error:
        return [Finding(check="engine memory", severity="note", found=f"not computed: {error}")]
    return [_judge(job, run, groups, parameters)]


def find_groups(run: Run, shards: int) -> tuple[list[Any], int]:
    """The parameter groups of the model over ``shards`` ranks (:class:`primus_odc.primitives.spec.GroupSpec`, parameters left out), and how
    many parameters the model has, as the trainer counts them.

    Raises:
        OdcError: the model cannot be built here, or its vocabulary is not known.
    """
    import torch

    from primus_odc.megatron.model import alone_unless_initialised, build_gpt_without_weights
    from primus_odc.primitives.spec import GroupSpec

    rows = _vocabulary(run)
    with alone_unless_initialised():
        model = build_gpt_without_weights(run.params, rows)
    units: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        units.setdefault(_unit_of(name, run), []).append(parameter)
    compute = torch.bfloat16 if run.params.get("bf16") else torch.float32
    # Megatron trains bf16 parameters beside the optimizer's fp32 copies; the standalone trainer keeps fp32 parameters.
    own = compute if run.kind else torch.float32
    groups = []
    for name, parameters in units.items():
        padded = sum(-(-p.shape[0] // shards) * (p.numel() // p.shape[0]) for p in parameters)
        groups.append(
            GroupSpec(
                name=name,
                params=(),
                shards=shards,
                shard_nbytes=padded * compute.itemsize if shards > 1 else 0,
                grad_numel=padded,
                grad_dtype=own,
                sum_dtype=torch.float32,
            )
        )
    return groups, sum(parameter.numel() for parameter in model.parameters())


def _unit_of(parameter: str, run: Run) -> str:
    if parameter.startswith("decoder.layers."):
        return ".".join(parameter.split(".")[:3])
    if run.kind is None:
        separate = {"output_layer": run.device_type == "cuda"}
    else:
        separate = {"embedding": True, "output_layer": run.params.get("transformer_impl") != "local"}
    module = parameter.partition(".")[0]
    return module if separate.get(module) else "root"


def _vocabulary(run: Run) -> int:
    """Rows of embedding and head, padded.

    Raises:
        OdcError: they are not known.
    """
    from primus_odc.data.build import build_tokenizer
    from primus_odc.megatron.run_options import vocabulary_rows
    from primus_odc.megatron.train_config import parse_train

    if run.kind is None:
        return vocabulary_rows(run.params, parse_train(run.params))
    if (rows := _number(run.params, "padded_vocab_size", None)) is not None:
        return rows
    multiple = _number(run.params, "make_vocab_size_divisible_by", 128)
    size = build_tokenizer(run.params).vocab_size if run.kind == "sft" else _of_megatrons_tokenizer(run.params)
    assert multiple is not None
    return -(-size // multiple) * multiple


def _of_megatrons_tokenizer(params: Mapping[str, Any]) -> int:
    """Tokens of the tokenizer that Megatron makes for pretraining: of these two known without its files."""
    tokenizer, size = params.get("tokenizer_type"), _number(params, "vocab_size", None)
    if size is None or tokenizer not in ("NullTokenizer", "TikTokenizer"):
        raise ConfigError([f"the vocabulary is that of Megatron's own tokenizer ({tokenizer}); padded_vocab_size is not in the YAML"])
    return size + 1 if tokenizer == "NullTokenizer" else size  # one more, for the end of a document


def _number(params: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = default if params.get(key) is None else params[key]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError([f"{key} is {describe(value)}; it must be a whole number of at least 1"])
    return value


def _judge(job: Job, run: Run, groups: list[Any], parameters: int) -> Finding:
    import torch

    from primus_odc.fsdp.choices import RING_SLOTS, budget_of, decide, memory_of, resolve_transport
    from primus_odc.primitives.nodes import Across, group_into_nodes
    from primus_odc.primitives.spec import plan_arena

    odc, device, local = run.comm.odc, torch.device(run.device_type), job.local_world()
    on_cpu = run.device_type == "cpu"
    # Not known where the stage that asks GPUs did not end.
    free = available_memory() // local if on_cpu else job.facts.get("gpu_free_bytes")
    what = f"free memory, divided by {local} ranks" if on_cpu else "free memory of a GPU before the model is on it"
    budget, source = budget_of(odc, lambda: (free, what)) if free is not None else (math.inf, "the free memory of the GPUs is not known")
    try:
        nodes = group_into_nodes(range(job.world()), odc.ranks_per_node, job.world(), [str(r // local) for r in range(job.world())])
        choices = decide(odc, groups, resolve_transport(odc, run.device_type, job.nodes), device, budget, source, nodes)
    except ConfigError as error:
        return Finding(check="engine memory", severity="problem", found="; ".join(error.problems))
    across = nodes.across if nodes is not None else Across()
    by_purpose = memory_of(groups, choices.accumulate, choices.transport, device, across, verify=odc.verify == "checksum")
    arena = plan_arena(groups, choices.accumulate, RING_SLOTS, device, across).nbytes
    total = sum(by_purpose.values())
    found = (
        f"adds {total / GIB:.3f} GiB to each of {job.world()} ranks, {arena / GIB:.3f} GiB of it shared (accumulate {choices.accumulate}, "
        f"parameters {choices.parameters}), for {parameters / 1e6:.1f} M parameters in {len(groups)} groups; {choices.reason}"
    )
    details = {
        "bytes": by_purpose,
        "arena_bytes": arena,
        "free_bytes": free,
        "parameters": parameters,
        "groups": len(groups),
        "choices": asdict(choices),
    }
    if free is None:
        return Finding(
            check="engine memory", severity="note", found=found, setting="odc.memory_budget_gib decides instead", details=details
        )
    if total <= free:
        return Finding(check="engine memory", severity="ok", found=found, details=details)
    setting = f"free is {free / GIB:.3f} GiB a rank: "
    setting += (
        "odc.accumulate: owner, more ranks"
        if choices.accumulate == "local" and nodes is None
        else "more ranks"
        if not on_cpu
        else "fewer ranks"
    )
    return Finding(check="engine memory", severity="problem", found=found, setting=f"{setting}, or a smaller model", details=details)
