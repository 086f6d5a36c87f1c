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
from primus_odc.experiment import load_experiment
from primus_odc.fsdp.choices import RING_SLOTS
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.train_config import normalise
from primus_odc.primitives.nodes import Across, group_into_nodes
from primus_odc.primitives.spec import memory_bytes
from tests.workers import run_workers

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cpu_odc_nopad.yaml"
# 257 byte tokens, padded to a multiple that neither 2 nor 3 ranks divide evenly
SMALL = ["--num_layers", "2", "--hidden_size", "64", "--ffn_hidden_size", "100", "--make_vocab_size_divisible_by", "7"]
VOCABULARY = 259


def experiment(*words: str) -> Run:
    params = normalise(load_experiment(CONFIG, [*SMALL, *words]).params)
    return Run(comm=parse_odc(params), params=params, device_type="cpu", kind=None)


def compare(rank: int, world_size: int, words: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int], int, int]:
    """(what the engine allocated, what was predicted, units, predicted groups)"""
    run = experiment(*words)
    groups = memory.find_groups(run, world_size)
    arm = Arm(run.params, run.comm, VOCABULARY, init_device_mesh("cpu", (world_size,)), torch.device("cpu"))
    assert arm.engine is not None
    mode, verify = arm.engine.choices.accumulate, run.comm.odc.verify == "checksum"
    nodes = group_into_nodes(range(world_size), run.comm.odc.ranks_per_node, world_size)
    across = nodes.across if nodes else Across()
    result = (
        arm.engine.memory,
        memory_bytes(groups, mode, RING_SLOTS, torch.device("cpu"), across, verify=verify),
        arm.num_units,
        len(groups),
    )
    dist.barrier()
    arm.close()
    return result


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, ("odc.accumulate=local", "--bf16", "true")),
        (3, ("odc.accumulate=owner", "odc.verify=checksum")),
        (3, ("odc.ranks_per_node=2",)),
        (1, ("odc.accumulate=local",)),
    ],
)
def test_prediction_is_what_a_real_engine_allocates(world_size: int, words: tuple[str, ...]) -> None:
    for allocated, predicted, units, groups in run_workers(compare, world_size, words):
        assert predicted == allocated and sum(allocated.values()) > 0
        assert groups == units


def count_groups(rank: int, world_size: int) -> list[int]:
    plain = experiment()
    counts = []
    for implementation in ("local", "transformer_engine"):
        params = {**plain.params, "transformer_impl": implementation}
        counts.append(len(memory.find_groups(Run(comm=plain.comm, params=params, device_type="cuda", kind="sft"), 8)))
    return counts


def test_units_in_primus_are_those_of_megatrons_wrapper() -> None:
    """Two layers, the embedding, the rest; with TransformerEngine the head too (docs/reproduce.md shows the first, as Primus logged it)."""
    assert run_workers(count_groups, 1) == [[4, 5]]


def judge(rank: int, world_size: int, free_gib: float | None, device_type: Any, words: tuple[str, ...]) -> Any:
    plain = experiment(*words)
    run = Run(comm=plain.comm, params=plain.params, device_type=device_type, kind=None)
    memory.available_memory = lambda: int((free_gib or 0) * 2**30)
    facts = {} if free_gib is None else {"gpu_free_bytes": int(free_gib * 2**30)}
    job = Job(config=str(CONFIG), ranks=4, facts=facts)
    return memory._judge(job, run, memory.find_groups(run, 4))


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
