"""The standalone trainer and the comparison on GPUs: the same numbers as one process in fp64, no wait for the device where none is due."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_odc.data import MinibatchStream
from primus_odc.errors import OdcError
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.checkpoint import load_checkpoint, save_checkpoint
from primus_odc.report.result import ComparisonResult
from tests.gpu.models import require_gpus
from tests.megatron.arm_cases import ARMS, everything, make_arm, minibatch_of, weights
from tests.megatron.gpt_cases import make_samples
from tests.megatron.test_arm import MINIBATCHES, check_arms
from tests.workers import run_workers

ROOT = Path(__file__).parents[2]


def train_all(rank: int, world_size: int) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    return check_arms(rank, world_size, torch.device("cuda", rank), 1e-5)


@pytest.mark.timeout(180)
def test_all_arms_train_the_fp64_reference() -> None:
    require_gpus(2, shared=False)
    first, second = run_workers(train_all, 2, timeout_s=160, gpu=True)
    for name in ARMS:
        for a, b in zip(first[name], second[name], strict=True):
            assert (a.loss, a.grad_norm, a.counts) == (b.loss, b.grad_norm, b.counts)


def count_collectives(rank: int, world_size: int) -> dict[str, list[int]]:
    """[what the outcome says, what the profiler saw] of a step, in each on-demand arm."""
    called = {}
    for name in ("odc_pad", "odc_nopad"):
        arm = make_arm(name, torch.device("cuda", rank), clip_grad=1.0)
        arm.train_step(minibatch_of(arm, 0, MINIBATCHES[0]))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            outcome = arm.train_step(minibatch_of(arm, 1, MINIBATCHES[2]))
        real = sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))
        assert outcome.collectives is not None
        called[name] = [outcome.collectives, real]
        arm.close()
    return called


@pytest.mark.timeout(180)
def test_a_step_on_demand_has_two_collectives() -> None:
    require_gpus(2, shared=False)
    for called in run_workers(count_collectives, 2, timeout_s=160, gpu=True):
        assert called == {"odc_pad": [2, 2], "odc_nopad": [2, 2]}


def watched(arm: Arm) -> None:
    """From the end of settle (or of the last backward) to the optimizer step any wait of the host for its device raises."""
    step, report = arm.optimizer.step, arm._report

    def reporting(*args: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        return report(*args)

    def stepping(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("default")

    arm._report, arm.optimizer.step = reporting, stepping  # type: ignore[method-assign, assignment]


def without_waiting(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank)
    for name in ("nccl_pad", "odc_nopad"):
        arm = make_arm(name, device, clip_grad=0.1)
        arm.train_step(minibatch_of(arm, 0, MINIBATCHES[0]))  # libraries start, state is made
        watched(arm)
        for step in (1, 2):
            arm.train_step(minibatch_of(arm, step, MINIBATCHES[step]))
        torch.cuda.set_sync_debug_mode("default")
        arm.close()


@pytest.mark.timeout(180)
def test_the_host_does_not_wait_for_the_device_between_settle_and_optimizer() -> None:
    require_gpus(2, shared=False)
    run_workers(without_waiting, 2, timeout_s=160, gpu=True)


def not_finite(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank)
    for name in ("nccl_pad", "odc_nopad"):
        arm = make_arm(name, device)
        arm.train_step(minibatch_of(arm, 0, MINIBATCHES[0]))
        with torch.no_grad():
            arm.model.decoder.final_layernorm.weight.fill_(math.nan)
        arm.publish()
        before = everything(arm)
        with pytest.raises(OdcError, match=r"step 1: the loss is nan, from ranks \[0, 1\]; nothing was updated"):
            arm.train_step(minibatch_of(arm, 1, make_samples((20, 20))))
        for key, value in everything(arm).items():
            assert torch.equal(value.nan_to_num(), before[key].nan_to_num()), (name, key)
        arm.close()


@pytest.mark.timeout(180)
def test_numbers_that_are_not_finite_update_nothing() -> None:
    require_gpus(2, shared=False)
    run_workers(not_finite, 2, timeout_s=160, gpu=True)


def resumed(rank: int, world_size: int) -> float:
    """Largest relative difference of the losses of a run that was saved and loaded, in another arm and with other ranks' memory."""
    device, worst = torch.device("cuda", rank), 0.0
    torch.backends.cuda.matmul.allow_tf32 = False
    for saved, loaded in (("odc_nopad", "odc_nopad"), ("nccl_pad", "odc_pad")):
        folder: list[Any] = [tempfile.mkdtemp(prefix="primus-odc-") if rank == 0 else None]
        dist.broadcast_object_list(folder, src=0, device=torch.device("cpu"))
        straight, stream = make_arm(saved, device), MinibatchStream(7, 2, 1, "data")
        straight.train_step(minibatch_of(straight, 0, MINIBATCHES[0]))
        save_checkpoint(Path(folder[0]), 1, straight, stream)
        other = make_arm(loaded, device)
        load_checkpoint(Path(folder[0]), 1, other, stream)
        mine, theirs = everything(other), everything(straight)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)
        for step in (1, 2):
            a, b = (arm.train_step(minibatch_of(arm, step, MINIBATCHES[step])) for arm in (straight, other))
            assert a.loss is not None and b.loss is not None
            worst = max(worst, abs(a.loss - b.loss) / a.loss)
        after, expected = weights(other), weights(straight)
        worst = max(worst, max(float((after[k] - expected[k]).norm() / expected[k].norm()) for k in expected))
        straight.close()
        other.close()
    return worst


@pytest.mark.timeout(180)
def test_a_run_continues_from_its_checkpoint() -> None:
    require_gpus(2, shared=False)
    assert max(run_workers(resumed, 2, timeout_s=160, gpu=True)) <= 1e-5


@pytest.mark.timeout(300)
def test_the_comparison_runs_on_gpus(tmp_path: Path) -> None:
    require_gpus(2, shared=False)
    words = ["--distributed_backend", "nccl", "--odc.transport", "auto", f"--data_cache_path={tmp_path / 'cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "primus_odc", "compare", "configs/smoke.yaml", "--nproc", "2", "--steps", "4", *words]
        + ["--arms", ",".join(ARMS), "--output", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = ComparisonResult.read(tmp_path / "out" / "result.json")
    assert result.machine["collectives"] == "NCCL/RCCL" and [arm.arm for arm in result.arms] == list(ARMS)
    assert max(result.agreement.values()) <= 1e-5
    for arm in result.arms:
        assert arm.phases is not None and arm.phases.optimizer_ms is not None and min(min(row) for row in arm.phases.optimizer_ms) > 0
        assert [[len(row) for row in step] for step in arm.microbatch_ms or []] == arm.microbatches
    assert {span.kind for span in result.timelines[0].spans} >= {"forward", "backward", "optimizer"}
