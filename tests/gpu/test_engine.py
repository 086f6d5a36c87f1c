"""The engine on GPUs of one node: the same gradients as one process in fp64, in every mode, and no device that waits for a peer."""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import primus_odc
from primus_odc.errors import PeerError, ProtocolError
from primus_odc.symmetric import stream_words
from tests.fsdp.models import check_gradients, tiny_model
from tests.fsdp.test_in_place import POLICIES, bytes_pulled, gradients
from tests.gpu.models import inputs, loss, reference, require_gpus, shard_wide, whole, wide, worst_error
from tests.workers import WorkerFailedError, run_workers

MODES: list[dict[str, Any]] = [
    {"accumulate": accumulate, "parameters": parameters} for accumulate in ("local", "owner") for parameters in ("reshard", "resident")
]
VERIFIED: list[dict[str, Any]] = [
    {"accumulate": accumulate, "parameters": "reshard", "verify": verify}
    for accumulate in ("local", "owner")
    for verify in ("checksum", "reference")
]
TINY = {
    1: [[2], [0], [1]],
    2: [[3, 1], [0, 2], [1, 1], [0, 0], [2, 0]],
    4: [[3, 1, 0, 2], [1, 1, 1, 1], [0, 0, 5, 1]],
    8: [[3, 1, 0, 2, 0, 1, 1, 4], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 5, 0, 1]],
}
WIDE = {
    1: [[2], [0], [1]],
    2: [[3, 1], [0, 2], [1, 1], [4, 0], [2, 5], [1, 2]],
    4: [[3, 1, 0, 2], [1, 1, 1, 1], [0, 0, 5, 1], [4, 3, 2, 1]],
    8: [[3, 1, 0, 2, 0, 1, 1, 2], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 5, 0, 1, 0, 0, 0]],
}
WORLDS = [1, 2, 4, 8]


def tiny(rank: int, world_size: int) -> dict[str, float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    errors = {}
    meshes: list[tuple[int, ...]] = [(world_size,)] + ([(2, world_size // 2)] if world_size > 1 else [])
    for shape in meshes:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for options in MODES + VERIFIED if len(shape) == 1 else MODES:
            for sharding in ({}, {"reshard_after_forward": False}) if options is MODES[0] else ({},):
                error = check_gradients(tiny_model, TINY[world_size], options, mesh, sharding, device="cuda")
                errors[f"{shape} {sharding} {options}"] = error
    return errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_equal_one_process(world_size: int) -> None:
    require_gpus(world_size)
    for errors in run_workers(tiny, world_size, timeout_s=220, gpu=True):
        assert {case: error for case, error in errors.items() if not error <= 1e-6} == {}


def many_minibatches(rank: int, world_size: int, options: dict[str, Any]) -> list[float]:
    """AdamW in between; hosts that dawdle at random, so that ranks drift apart."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, double = shard_wide(wide()), wide(dtype=torch.float64)
    engine = primus_odc.attach(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # 1e-3 comes near the minimum, see loss
    dawdle = torch.Generator().manual_seed(rank)
    errors = []
    for step, counts in enumerate(3 * WIDE[world_size]):
        double.load_state_dict({k: whole(v).double() for k, v in model.state_dict().items()})
        engine.begin_minibatch(counts[rank] if step % 4 else None)
        for index in range(counts[rank]):
            time.sleep(float(torch.rand((), generator=dawdle)) * 0.01)
            loss(model, inputs(step, rank, index)).backward()
        engine.settle()
        expected = reference(double, step, counts)
        errors.append(worst_error(model, expected))
        norm = engine.clip_grad_norm_(0.5)
        norm64 = torch.stack([g.norm() for g in expected.values()]).norm()
        errors.append(float((norm.double() - norm64).abs() / norm64))
        if norm64 > 0.5:
            errors.append(worst_error(model, {k: 0.5 * g / norm64 for k, g in expected.items()}))
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    return errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(o.values()))
def test_many_minibatches_with_hosts_that_drift_apart(world_size: int, options: dict[str, Any]) -> None:
    require_gpus(world_size)
    for errors in run_workers(many_minibatches, world_size, options, timeout_s=220, gpu=True):
        assert max(errors) <= 1e-6, errors


def like_stock(rank: int, world_size: int, accumulate: str) -> list[float]:
    """Mixed precision against stock FSDP2 on the same microbatches: the same bf16 forward, sums in another order."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stock, ours = (shard_wide(wide(), mp_policy=policy) for _ in range(2))
    for module in stock.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    engine = primus_odc.attach(ours, accumulate=accumulate)
    worst = []
    for step in range(3):
        engine.begin_minibatch(2)
        for index in range(2):
            x = inputs(step, rank, index)
            loss(ours, x).backward()
            loss(stock, x).backward()
        engine.settle()
        worst.append(worst_error(ours, {k: whole(p.grad).double() for k, p in stock.named_parameters() if p.grad is not None}))
        for model in (stock, ours):
            torch.optim.SGD(model.parameters(), lr=1e-2).step()
            model.zero_grad()
    engine.detach()
    return worst


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
def test_mixed_precision_equals_stock_fsdp2(accumulate: str) -> None:
    require_gpus(2, shared=False)
    for worst in run_workers(like_stock, 2, accumulate, timeout_s=110, gpu=True):
        assert max(worst) <= 1e-5, worst


@pytest.mark.timeout(180)
@pytest.mark.parametrize("reduced_in", POLICIES)
@pytest.mark.parametrize("options", [{"accumulate": "local", "parameters": p} for p in ("reshard", "resident")] + [{"accumulate": "owner"}])
def test_gradients_written_where_they_are_pulled_from(options: dict[str, Any], reduced_in: str) -> None:
    require_gpus(2)
    for rank, found in enumerate(run_workers(gradients, 2, reduced_in, options, True, "cuda", timeout_s=160, gpu=True)):
        assert found["worst"] <= 1e-6
        if options["accumulate"] == "local":
            assert found["pulled"] == bytes_pulled(rank, reduced_in, True)


def finishes_alone(rank: int, world_size: int, accumulate: str) -> list[float]:
    """Rank 0 computes its whole minibatch, synchronises its device and flushes its allocator before rank 1 begins to compute."""
    store = dist.distributed_c10d._get_default_store()
    model, double = shard_wide(wide()), wide(dtype=torch.float64)
    engine = primus_odc.attach(model, accumulate=accumulate)
    errors = []
    for step in range(3):
        engine.begin_minibatch(2)
        if rank == 1:
            store.wait([f"alone{step}"])
        for index in range(2):
            loss(model, inputs(step, rank, index)).backward()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if rank == 0:
            store.set(f"alone{step}", "1")
        engine.settle()
        errors.append(worst_error(model, reference(double, step, [2, 2])))
        model.zero_grad()
    engine.detach()
    return errors


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", ["local", "owner"])
def test_a_device_synchronisation_does_not_wait_for_another_ranks_minibatch(accumulate: str) -> None:
    require_gpus(2)
    for errors in run_workers(finishes_alone, 2, accumulate, timeout_s=110, gpu=True):
        assert max(errors) <= 1e-6, errors


def collective_after_settle(rank: int, world_size: int) -> float:
    """A blocking collective of the user's right behind settle: the words peers wait for must not need this host."""
    model = shard_wide(wide())
    engine = primus_odc.attach(model, accumulate="local")
    for step in range(4):
        engine.begin_minibatch(1 + rank)
        for index in range(1 + rank):
            loss(model, inputs(step, rank, index, rows=20000)).backward()
        engine.settle()
        dist.barrier()
        torch.cuda.synchronize()
        model.zero_grad()
    engine.detach()
    return 0.0


@pytest.mark.timeout(120)
def test_a_collective_may_follow_settle_at_once() -> None:
    require_gpus(2)
    run_workers(collective_after_settle, 2, timeout_s=110, gpu=True)


def same_bits(rank: int, world_size: int) -> list[torch.Tensor]:
    torch.use_deterministic_algorithms(True)
    runs = []
    for _ in range(3):
        model = shard_wide(wide())
        engine = primus_odc.attach(model, deterministic=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, counts in enumerate(WIDE[2]):
            engine.begin_minibatch(counts[rank])
            for index in range(counts[rank]):
                time.sleep(0.003 * rank)
                loss(model, inputs(step, rank, index)).backward()
            engine.settle()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        runs.append(torch.cat([whole(p).detach().reshape(-1) for p in model.parameters()]).cpu())
    return runs


@pytest.mark.timeout(120)
def test_deterministic_runs_are_equal_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    require_gpus(2)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for runs in run_workers(same_bits, 2, timeout_s=110, gpu=True):
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])


def norms_of_different_kinds(rank: int, world_size: int) -> bool:
    model = shard_wide(wide())
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    loss(model, inputs(0, rank, 0)).backward()
    engine.settle()
    before = engine.totals()["collectives"]
    norm = engine.clip_grad_norm_(1.0, 2.0 if rank == 0 else 1.0)
    assert engine.totals()["collectives"] == before + 1 and math.isnan(float(norm))
    torch.cuda.synchronize()
    with pytest.raises((ProtocolError, PeerError), match="took another one"):
        engine.publish()
    return True


@pytest.mark.timeout(120)
def test_norms_of_different_kinds_are_no_number_and_told_by_the_next_publish() -> None:
    require_gpus(2)
    assert run_workers(norms_of_different_kinds, 2, timeout_s=100, gpu=True) == [True, True]


def dropped_engines(rank: int, world_size: int) -> list[float]:
    errors = []
    for _ in range(3):
        model = shard_wide(wide())
        engine = primus_odc.attach(model)
        engine.begin_minibatch(1)
        loss(model, inputs(0, rank, 0)).backward()
        engine.settle()
        errors.append(engine.grad_norm())
        dist.barrier()
        del engine, model  # without detach()
        gc.collect()
    assert len(stream_words._DROPPED) == 1, "the last one; the others were unpinned by their followers"
    return errors


@pytest.mark.timeout(120)
def test_an_engine_that_was_dropped_is_unpinned_by_the_next() -> None:
    require_gpus(2)
    for norms in run_workers(dropped_engines, 2, timeout_s=110, gpu=True):
        assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def edits_after_publish(rank: int, world_size: int) -> str:
    model = shard_wide(wide())
    engine = primus_odc.attach(model)
    with torch.no_grad():
        next(model.blocks[2].parameters()).mul_(2.0)
    engine.begin_minibatch(1)
    loss(model, inputs(0, rank, 0)).backward()
    engine.settle()
    try:
        engine.begin_minibatch(1)
    except (ProtocolError, PeerError) as error:
        return str(error)
    return "nothing was said"


@pytest.mark.timeout(120)
def test_parameters_edited_after_publish_are_reported_before_the_next_minibatch() -> None:
    require_gpus(2)
    for said in run_workers(edits_after_publish, 2, timeout_s=110, gpu=True):
        assert "parameters of group blocks.2 changed after they were published in epoch 1" in said


def edit_between_evaluations(rank: int, world_size: int) -> str:
    """Of a model that is never trained."""
    model = shard_wide(wide())
    engine = primus_odc.attach(model)
    with torch.no_grad():
        model(inputs(0, rank, 0))
        next(model.blocks[2].parameters()).mul_(2.0)
        model(inputs(0, rank, 0))
    try:
        engine.publish()
    except (ProtocolError, PeerError) as error:
        return str(error)
    return "nothing was said"


@pytest.mark.timeout(120)
def test_an_edit_between_evaluations_is_reported_at_the_next_publication() -> None:
    require_gpus(2)
    for said in run_workers(edit_between_evaluations, 2, timeout_s=110, gpu=True):
        assert "parameters of group blocks.2 changed after they were published in epoch 1" in said


def killed(rank: int, world_size: int, accumulate: str) -> str:
    model = shard_wide(wide())
    engine = primus_odc.attach(model, accumulate=accumulate, timeout_s=20)
    for step in range(3):
        engine.begin_minibatch(1)
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss(model, inputs(step, rank, 0)).backward()
        engine.settle()
        model.zero_grad()
    return "ended"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("accumulate", ["local", "owner"])
def test_a_killed_rank_is_named(accumulate: str, world_size: int) -> None:
    require_gpus(world_size)
    with pytest.raises(WorkerFailedError) as failed:
        run_workers(killed, world_size, accumulate, timeout_s=100, gpu=True)
    assert failed.value.codes[1] == -signal.SIGKILL
    for rank in set(range(world_size)) - {1}:
        assert "rank 1 died (its process ended without a goodbye)" in failed.value.tracebacks[rank]
