"""The engine on NVSHMEM or MORI (``odc.transport: nvshmem | mori``), with GPUs of one machine taken for nodes: what crosses between them
goes through the library's calls. Two GPUs are two nodes, four are two nodes of two; with ``SHARE_GPUS=1`` a GPU serves several ranks, of
both nodes.

The cases are those of the other GPU tests, with every engine on that transport. They need the native module, which
``bash scripts/test_shmem.sh build engine`` makes and which runs them. No network card is there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import primus_odc
from primus_odc.errors import OdcError
from primus_odc.symmetric.shmem.write_order import ALL_DEVICES, OWNER, can_flush, flush_writes, writes_ordering
from tests.gpu import test_cases, test_engine, test_memory, test_nodes, test_overlap
from tests.gpu.models import SHMEM, inputs, loss, reference, require_gpus, require_shmem, shard_wide, wide, worst_error
from tests.gpu.test_memory import PAGE, TOLERANCE, in_use
from tests.workers import WorkerFailedError, run_workers

ROOT = Path(__file__).parents[2]
WORLDS = [2, 4]


def over_library(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` with every engine of this rank on the library, spread over two nodes."""
    attach = primus_odc.attach

    def attach_on_library(model: Any, **options: Any) -> Any:
        options.pop("accumulate", None)
        return attach(model, **{"transport": SHMEM, "ranks_per_node": world_size // 2, **options})

    with mock.patch.object(primus_odc, "attach", attach_on_library):
        return function(rank, world_size, *args)


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 160, shared: bool = True) -> list[Any]:
    require_shmem(world_size, shared)
    return run_workers(over_library, world_size, function, *args, timeout_s=timeout_s, gpu=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [*WORLDS, 8])
def test_gradients_equal_one_process(world_size: int) -> None:
    for errors in run(test_nodes.tiny, world_size, timeout_s=220):
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("parameters", ["reshard", "resident"])
def test_many_minibatches_with_hosts_that_drift_apart(world_size: int, parameters: str) -> None:
    for errors in run(test_engine.many_minibatches, world_size, {"parameters": parameters}, timeout_s=220):
        assert max(errors) <= 1e-6, errors


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", WORLDS)
def test_one_node_needs_no_network(world_size: int) -> None:
    for errors in run(test_engine.many_minibatches, world_size, {"ranks_per_node": world_size}):
        assert max(errors) <= 1e-6, errors


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("parameters", ["reshard", "resident"])
def test_a_rank_that_runs_ahead_meets_no_older_or_newer_data(parameters: str, world_size: int) -> None:
    for errors in run(test_cases.runs_ahead, world_size, {"parameters": parameters}):
        assert max(errors) <= 1e-6, errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", WORLDS)
def test_random_delays_change_no_bit(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert run(test_cases.same_bits, world_size, 40, timeout_s=220) == [[]] * world_size


@pytest.mark.timeout(180)
def test_deterministic_runs_are_equal_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for runs in run(test_engine.same_bits, 2):
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])


@pytest.mark.timeout(180)
def test_a_device_synchronisation_does_not_wait_for_another_nodes_minibatch() -> None:
    for errors in run(test_engine.finishes_alone, 2, "local"):
        assert max(errors) <= 1e-6, errors


@pytest.mark.timeout(180)
def test_a_collective_may_follow_settle_at_once() -> None:
    run(test_engine.collective_after_settle, 2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_killed_rank_is_named(world_size: int) -> None:
    with pytest.raises(WorkerFailedError) as failed:
        run(test_engine.killed, world_size, "local", timeout_s=100)
    assert failed.value.codes[1] == -9
    for rank, text in failed.value.tracebacks.items():
        assert rank == 1 or "rank 1 died (its process ended without a goodbye)" in text, text
    assert None not in failed.value.codes, "a witness did not end by itself"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", WORLDS)
def test_most_of_the_settle_is_hidden_behind_backward(world_size: int) -> None:
    ranks = run(test_overlap.delivered_early, world_size, "local", shared=False)
    shares = [share for found in ranks for share, _ in found]
    print("shares of the settle that were over before backward was:", shares)
    assert sorted(shares)[len(shares) // 2] >= 0.8, shares
    assert min(size for found in ranks for _, size in found) > 0


def comes_and_goes(rank: int, world_size: int) -> list[float]:
    """Engines of models of two sizes, one after the other and side by side."""
    torch.backends.cuda.matmul.allow_tf32 = False
    depths = (2, 6)
    models, doubles = [shard_wide(wide(depth=d)) for d in depths], [wide(dtype=torch.float64, depth=d) for d in depths]
    errors = []

    def train(engine: Any, which: int, step: int) -> None:
        engine.begin_minibatch(2)
        for index in range(2):
            loss(models[which], inputs(step, rank, index)).backward()
        engine.settle()
        errors.append(worst_error(models[which], reference(doubles[which], step, [2] * world_size)))
        models[which].zero_grad()

    for turn in range(2):
        for which in (0, 1):
            engine = primus_odc.attach(models[which])
            for step in range(2):
                train(engine, which, 10 * turn + step)
            engine.detach()
    engines = [primus_odc.attach(model) for model in models]
    for step in range(2):
        for which in (0, 1):
            train(engines[which], which, 100 + step)
    for engine in engines:
        engine.detach()
    return errors


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", WORLDS)
def test_engines_follow_each_other_and_stand_side_by_side(world_size: int) -> None:
    for errors in run(comes_and_goes, world_size):
        assert max(errors) <= 1e-6, errors


def called(rank: int, world_size: int) -> tuple[list[str], dict[str, int]]:
    """Collectives in forward, backward, settle and publish, and how often each kernel of ours ran meanwhile."""
    model = shard_wide(wide())
    engine = primus_odc.attach(model)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for step in range(2):  # the first compiles kernels
        with torch.profiler.profile(activities=kinds) as profile:
            engine.begin_minibatch(1 + rank)
            for index in range(1 + rank):
                loss(model, inputs(step, rank, index)).backward()
            engine.settle()
            engine.publish()
            torch.cuda.synchronize()
        model.zero_grad()
    names = {event.key.partition("(")[0]: event.count for event in profile.key_averages()}
    engine.detach()
    return [name for name in names if "nccl" in name.lower() or name.startswith("c10d::")], {
        name: count for name, count in names.items() if name.startswith("odc_")
    }


@pytest.mark.timeout(180)
def test_no_collective_in_a_step_and_one_launch_for_each_word() -> None:
    for collectives, kernels in run(called, 2):
        assert collectives == []
        # A node of one rank sends to one other: a shard and a partial of each of 7 groups, that the node is done, and checks nothing back.
        assert set(kernels) == {"odc_put"} and 14 <= kernels["odc_put"] <= 16, kernels


GRANULE = 16 << 20


@pytest.mark.timeout(180)
def test_the_engine_adds_what_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_CUMEM_GRANULARITY", str(GRANULE))  # by which the library's heap grows
    for found in run(test_memory.added, 2, {"parameters": "reshard"}, True, shared=False):
        for formula, measured in found:
            assert abs(measured - formula) <= TOLERANCE * formula + GRANULE + 4 * PAGE, found


def what_the_library_takes(rank: int, world_size: int) -> tuple[int, int]:
    """(``library`` and arena of the first engine by the formula, measured)."""
    model = shard_wide(wide(depth=12))
    before = in_use(rank)
    engine = primus_odc.attach(model)
    memory = engine.memory
    measured = in_use(rank) - before
    engine.detach()
    return sum(memory.values()), measured


@pytest.mark.timeout(180)
def test_what_the_library_keeps_is_in_the_formula() -> None:
    for formula, measured in run(what_the_library_takes, 2, shared=False):
        print(f"first engine: {measured / 2**20:.0f} MiB measured, {formula / 2**20:.0f} MiB by the formula")
        # Beside the heap: the context's own memory for the library's and our kernels.
        assert measured <= formula + (256 << 20), (formula, measured)


def other_ranks(rank: int, world_size: int) -> str:
    whole = primus_odc.attach(shard_wide(wide(depth=1)))
    mesh = init_device_mesh("cuda", (2, world_size // 2), mesh_dim_names=("a", "b"))["b"]
    try:
        primus_odc.attach(shard_wide(wide(depth=1), mesh), ranks_per_node=1)
    except OdcError as error:
        whole.detach()
        return str(error)
    return "nothing was said"


@pytest.mark.timeout(180)
def test_the_library_serves_one_set_of_ranks() -> None:
    for said in run(other_ranks, 4):
        assert "the library serves one set of ranks in a process" in said


def refused_owner(rank: int, world_size: int) -> str:
    with pytest.raises(OdcError) as caught:
        primus_odc.attach(shard_wide(wide(depth=1)), transport=SHMEM, accumulate="owner")
    dist.barrier()
    return str(caught.value)


@pytest.mark.timeout(120)
def test_owner_mode_is_refused() -> None:
    require_gpus(2)
    for said in run_workers(refused_owner, 2, timeout_s=100, gpu=True):
        assert "odc.accumulate: local (or auto)" in said or f"PRIMUS_ODC_BUILD={SHMEM}" in said


@pytest.mark.timeout(180)
def test_a_script_that_ends_leaves_a_zero_exit_status() -> None:
    require_shmem(2, shared=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.gpu.shmem_script"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("trained") == 2, done.stdout + done.stderr


def test_the_driver_tells_the_order_of_a_network_cards_writes() -> None:
    require_gpus(1)
    found = writes_ordering(torch.device("cuda", 0))
    print("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:", found)
    assert found in (0, OWNER, ALL_DEVICES)


def test_the_host_can_flush_a_network_cards_writes() -> None:
    require_gpus(1)
    device = torch.device("cuda", 0)
    if not can_flush(device):
        pytest.skip("this driver has no flush for the host")
    flush_writes(device)
