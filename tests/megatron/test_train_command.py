"""`primus-odc train` as a user starts it: real processes, real text."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from primus_odc.errors import ConfigError
from primus_odc.megatron.command import QUIET_S, add_train_arguments, run_train
from primus_odc.report.logs import read_step_log
from tests.megatron.test_local_ranks import gone

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
TIMEOUT_S = 100


def environment(workspace: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PRIMUS_WORKSPACE": str(workspace), "PYTHONWARNINGS": "ignore"}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def train(workspace: Path, *words: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """``primus-odc train`` with the smoke configuration."""
    return subprocess.run(
        [sys.executable, *launcher, "-m", "primus_odc", "train", str(SMOKE), *words],
        env=environment(workspace),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_smoke_under_torchrun(tmp_path: Path) -> None:
    words = (
        "--comm_backend",
        "odc_nopad",
        "--sft_max_samples",
        "300",
        "--sft_validation_fraction",
        "0.1",
        "--save",
        str(tmp_path / "ckpt"),
        "odc.timeout_s=40",
    )
    done = train(tmp_path, *words, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    for part in ("arm odc_nopad on 2 ranks", "3 FSDP2 units", "step 3/3 | loss", "validation after step 3", "saved"):
        assert done.stdout.count(part) == 1, (part, done.stdout)
    log = read_step_log(tmp_path / "primus_odc" / "local" / "smoke")
    assert log.header.arm == "odc_nopad" and log.header.world_size == 2 and not log.torn
    losses = [step.loss for step in log.steps]
    assert len(losses) == 3 and all(loss is not None and 4 < loss < 7 for loss in losses)
    assert all(step.ms > 0 and len(step.microbatches) == 2 and len(step.waited_s) == 2 for step in log.steps)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "3\n"


FAILING = """
import os, sys
from primus_odc.megatron import arm
original = arm.Arm.train_step
def train_step(self, minibatch, recorder=None):
    if self.rank == 1 and minibatch.step == 1:
        raise RuntimeError("broken on purpose")
    return original(self, minibatch, recorder)
arm.Arm.train_step = train_step
from primus_odc.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_failing_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    # Without torchrun, which would end the other rank itself.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**environment(tmp_path), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = (str(SMOKE), "--comm_backend", "odc_pad", "--sft_max_samples", "300", "--sft_validation_fraction", "0.1", "odc.timeout_s=40")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, *words],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [2, 1], errors
    assert "broken on purpose" in errors[1] and "Traceback" in errors[1]
    assert errors[0].count("primus-odc: error: on rank 0: ") == 1 and "Traceback" not in errors[0], errors[0]
    assert "rank 1" in errors[0].partition("error: on rank 0: ")[2], errors[0]


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_what_all_ranks_find_is_told_once(tmp_path: Path) -> None:
    words = ("--comm_backend", "odc_nopd", "--hidden_size", "nan", "--lr", "0", "--sft_dataset_name", "absent.jsonl", "--trani_iters", "3")
    done = train(tmp_path, *words, launcher=TORCHRUN)
    assert done.returncode != 0
    assert done.stderr.count("primus-odc: error: ") == 1, done.stderr
    for key in ("comm_backend: ", "hidden_size: ", "min_lr ", "sft_dataset_name ", "trani_iters "):
        assert done.stderr.count(f"  - {key}") == 1, (key, done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_unusable_data_are_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    words = ("--comm_backend", "odc_nopad", "--sft_dataset_name", str(tmp_path / "bad.jsonl"), "--eval_iters", "0")
    done = train(tmp_path, *words)
    assert done.returncode == 2
    assert "primus-odc: error: sample 'bad.jsonl:1'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_killed_launcher_leaves_no_rank_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ["--comm_backend", "odc_nopad", "--sft_max_samples", "300", "--eval_iters", "0", "--save", str(tmp_path / "c")]
    words += ["--load", str(tmp_path / "c"), "--save_interval", "1", "--lr_decay_iters", "9000"]
    command = [sys.executable, *TORCHRUN, "-m", "primus_odc", "train", str(SMOKE), *words, "--train_iters", "9000"]
    log = tmp_path / "primus_odc" / "local" / "smoke" / "steps.jsonl"
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen(command, env=environment(tmp_path), stdout=out, stderr=out)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + TIMEOUT_S / 2
        while not (log.exists() and log.read_text().count("\n") > 2):
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait(timeout=30)
    assert all(gone(pid) for pid in ranks)
    steps = len(read_step_log(log).steps)
    done = train(tmp_path, *words, "--train_iters", "9000", "--exit_interval", "1", launcher=TORCHRUN)
    assert done.returncode == 0 and "continuing after step" in done.stdout, done.stderr
    assert 0 < len(read_step_log(log).steps) <= steps + 1


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    args, overrides = parser.parse_known_args(words)
    args.overrides = overrides
    return args


@pytest.mark.parametrize("local_rank", ["0", "1", None])
def test_all_but_the_first_of_a_host_wait_for_their_end(local_rank: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits: list[float] = []
    monkeypatch.setattr("primus_odc.megatron.command.time.sleep", waits.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(ConfigError, match="cannot read"):
        run_train(arguments(str(tmp_path / "absent.yaml")))
    assert waits == ([QUIET_S] if local_rank == "1" else [])


def test_check_trains_nothing_and_refuses_what_training_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRIMUS_WORKSPACE", str(tmp_path))
    words = ("--check", str(SMOKE), "--comm_backend", "odc_pad")
    assert run_train(arguments(*words)) == 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="needs a GPU for each of 1 processes"):
        run_train(arguments(*words, "--distributed_backend", "nccl"))
    run = tmp_path / "primus_odc" / "local" / "smoke"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text("header\nstep\n")
    with pytest.raises(ConfigError, match=r"steps\.jsonl is the log of another run"):
        run_train(arguments(*words))
    assert run_train(arguments(*words, "--exp_name", "second")) == 0
