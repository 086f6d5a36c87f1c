"""The memory the doctor computes against what a real engine on real ranks allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc.config import parse_odc
from primus_odc.doctor import memory
from primus_odc.doctor.job import Job
from primus_odc.doctor.run import Run
from primus_odc.errors import ConfigError
from primus_odc.experiment import load_experiment
from primus_odc.fsdp.choices import RING_SLOTS
from primus_odc.fsdp.probe import find_units
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.model import build_gpt
from primus_odc.megatron.run_options import vocabulary_rows
from primus_odc.megatron.sharding import mixed_precision, shard_gpt
from primus_odc.megatron.train_config import normalise, parse_train
from primus_odc.primitives.nodes import Across, group_into_nodes
from primus_odc.primitives.spec import memory_bytes
from tests.workers import run_workers

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cpu_odc_nopad.yaml"
# 259 byte tokens, padded to a multiple that neither 2 nor 3 ranks divide evenly
SMALL = ["--num_layers", "2", "--hidden_size", "64", "--ffn_hidden_size", "100", "--make_vocab_size_divisible_by", "7"]


def parameters_of(rows: int, hidden: int = 64, ffn: int = 100, layers: int = 2, heads: int = 8, groups: int = 4) -> int:
    """Of the quickstart's model (Qwen2: biases of query, key and value, gated MLP, nothing shared), counted by hand."""
    qkv = hidden + 2 * groups * (hidden // heads)
    layer = hidden * qkv + qkv + hidden * hidden + 3 * hidden * ffn + 2 * hidden
    return layers * layer + 2 * rows * hidden + hidden


def experiment(*words: str) -> Run:
    params = normalise(load_experiment(CONFIG, [*SMALL, *words]).params)
    return Run(comm=parse_odc(params), params=params, device_type="cpu", kind=None)


def compare(rank: int, world_size: int, words: tuple[str, ...]) -> tuple[Any, Any]:
    """(memory, units and parameters of the engine and model that the trainer makes, what the doctor says of them)"""
    run = experiment(*words)
    groups, parameters = memory.find_groups(run, world_size)
    rows = vocabulary_rows(run.params, parse_train(run.params))
    arm = Arm(run.params, run.comm, rows, init_device_mesh("cpu", (world_size,)), torch.device("cpu"))
    assert arm.engine is not None
    mode, verify = arm.engine.choices.accumulate, run.comm.odc.verify == "checksum"
    nodes = group_into_nodes(range(world_size), run.comm.odc.ranks_per_node, world_size)
    across = nodes.across if nodes else Across()
    predicted = memory_bytes(groups, mode, RING_SLOTS, torch.device("cpu"), across, verify=verify)
    result = (
        (arm.engine.memory, arm.num_units, sum(p.numel() for p in arm.model.parameters())),
        (predicted, len(groups), parameters),
    )
    dist.barrier()
    arm.close()
    return result


@pytest.mark.parametrize(
    ("world_size", "rows", "words"),
    [
        (2, 259, ("odc.accumulate=local", "--bf16", "true")),
        (3, 259, ("odc.accumulate=owner", "odc.verify=checksum")),
        (3, 384, ("odc.ranks_per_node=2", "--make_vocab_size_divisible_by", "128")),
        (1, 300, ("odc.accumulate=local", "--make_vocab_size_divisible_by", "100")),
    ],
)
def test_prediction_is_what_a_real_engine_allocates(world_size: int, rows: int, words: tuple[str, ...]) -> None:
    """Parameters are those of the model: 2 and 3 ranks pad the 100 rows of the MLP and the 259 of the vocabulary, which is no parameter."""
    for real, predicted in run_workers(compare, world_size, words):
        assert predicted == real and sum(real[0].values()) > 0
        assert predicted[2] == parameters_of(rows)


def count_groups(rank: int, world_size: int) -> list[int]:
    plain = experiment()
    counts = []
    for implementation in ("local", "transformer_engine"):
        params = {**plain.params, "transformer_impl": implementation}
        counts.append(len(memory.find_groups(Run(comm=plain.comm, params=params, device_type="cuda", kind="sft"), 8)[0]))
    return counts


def units_on_gpus(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Elements of a rank's shard of every unit: of the model sharded as on a GPU, and as the doctor says."""
    plain = experiment()
    run = Run(comm=plain.comm, params=plain.params, device_type="cuda", kind=None)
    groups, _ = memory.find_groups(run, world_size)
    model = build_gpt(run.params, 259, device=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (world_size,))
    units = find_units(shard_gpt(model, mesh, mixed_precision(run.params, on_demand=True), separate_head=True), world_size)
    return sorted(unit.spec.grad_numel for unit in units), sorted(group.grad_numel for group in groups)


def test_units_on_gpus_are_those_of_the_trainer() -> None:
    """The head is a unit of its own there."""
    for real, predicted in run_workers(units_on_gpus, 2):
        assert predicted == real and len(real) == 4


def rows_in_primus(rank: int, world_size: int, changes: tuple[dict[str, Any], ...]) -> list[int | str]:
    plain = experiment()
    found: list[int | str] = []
    for change in changes:
        params = {key: value for key, value in plain.params.items() if key != "make_vocab_size_divisible_by"} | change
        kind: Any = "pretrain" if "tokenizer" in str(params["tokenizer_type"]).lower() else "sft"
        try:
            parameters = memory.find_groups(Run(comm=plain.comm, params=params, device_type="cuda", kind=kind), 3)[1]
        except ConfigError as error:
            found.append(error.problems[0])
        else:
            found.append((parameters - parameters_of(0)) // (2 * 64))
    return found


def test_the_vocabulary_in_primus_is_padded_as_megatron_pads_it() -> None:
    """megatron/core/tokenizers/utils/build_tokenizer.py; its NullTokenizer has a token more than vocab_size."""
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 512}
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"make_vocab_size_divisible_by": 7},
        {"padded_vocab_size": 1000},
        null,
        {**null, "vocab_size": 511},
        {**null, "tokenizer_type": "TikTokenizer"},
        {**null, "tokenizer_type": "HuggingFaceTokenizer"},
        {"make_vocab_size_divisible_by": 0},
    )
    ((*rows, unknown, wrong),) = run_workers(rows_in_primus, 1, changes)
    assert rows == [384, 259, 1000, 640, 512, 512]
    assert "Megatron's own tokenizer (HuggingFaceTokenizer); padded_vocab_size is not in the YAML" in unknown
    assert "make_vocab_size_divisible_by is the number 0; it must be a whole number of at least 1" in wrong


def test_units_in_primus_are_those_of_megatrons_wrapper() -> None:
    """Two layers, the embedding, the rest; with TransformerEngine the head too (docs/reproduce.md shows the first, as Primus logged it)."""
    assert run_workers(count_groups, 1) == [[4, 5]]


def judge(rank: int, world_size: int, free_gib: float | None, device_type: Any, words: tuple[str, ...]) -> Any:
    plain = experiment(*words)
    run = Run(comm=plain.comm, params=plain.params, device_type=device_type, kind=None)
    memory.available_memory = lambda: int((free_gib or 0) * 2**30)
    facts = {} if free_gib is None else {"gpu_free_bytes": int(free_gib * 2**30)}
    job = Job(config=str(CONFIG), ranks=4, facts=facts)
    return memory._judge(job, run, *memory.find_groups(run, 4))


# 404 M parameters: 1.6 GB of gradients in one piece, 0.4 GB on each of four owners
LARGE = ("--num_layers", "24", "--hidden_size", "1024", "--ffn_hidden_size", "4608")
AUTO = ("odc.transport=auto", "odc.accumulate=auto", "odc.parameters=auto")


@pytest.mark.parametrize(
    ("free_gib", "device_type", "words", "severity", "accumulate", "setting"),
    [
        (8.0, "cpu", AUTO, "ok", "local", ""),
        (8.0, "cpu", (*AUTO, *LARGE), "ok", "owner", ""),
        (8.0, "cpu", (*AUTO, *LARGE, "odc.ranks_per_node=2"), "problem", "local", "a rank: fewer ranks, or"),
        (1.0, "cpu", (*AUTO, *LARGE), "problem", "owner", "fewer ranks"),
        (0.0001, "cpu", AUTO, "problem", "owner", "fewer ranks"),
        (0.001, "cpu", ("odc.accumulate=local",), "problem", "local", "odc.accumulate: owner"),
        (0.0001, "cuda", AUTO, "problem", "owner", "more ranks"),
        (None, "cuda", AUTO, "note", "local", "odc.memory_budget_gib"),
    ],
)
def test_too_little_memory_is_a_problem(
    free_gib: float | None, device_type: str, words: tuple[str, ...], severity: str, accumulate: str, setting: str
) -> None:
    (finding,) = run_workers(judge, 1, free_gib, device_type, words)
    assert (finding.severity, finding.details["choices"]["accumulate"]) == (severity, accumulate), finding
    assert setting in finding.setting
    arena, total = finding.details["arena_bytes"], sum(finding.details["bytes"].values())
    assert 0 < arena < total
    across = finding.details["bytes"]["fan_out"] > 0 and finding.details["bytes"]["staging"] > 0
    assert across == (finding.details["choices"]["nodes"] > 1) == ("odc.ranks_per_node=2" in words)


def test_what_nodes_do_not_allow_is_a_problem() -> None:
    (finding,) = run_workers(judge, 1, 8.0, "cpu", ("odc.accumulate=owner", "odc.ranks_per_node=2"))
    assert finding.severity == "problem" and "2 nodes, and odc.accumulate: owner would push" in finding.found, finding
