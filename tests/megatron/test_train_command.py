"""`primus-odc train` as a user starts it: real processes, real text."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus_odc.cli import main
from primus_odc.errors import ConfigError
from primus_odc.megatron.command import QUIET_S, add_train_arguments, run_train
from primus_odc.report.logs import read_step_log
from tests.megatron.test_local_ranks import children, end_by, gone
from tests.workers import Program

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
TIMEOUT_S = 100
DATA = ("--sft_max_samples", "300", "--sft_validation_fraction", "0.1")


def environment(workspace: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PRIMUS_WORKSPACE": str(workspace), "PYTHONWARNINGS": "ignore"}


def rank_of_two(rank: int, port: int = 0) -> dict[str, str]:
    """What torchrun tells a rank, but for torchrun."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, (str(rank), str(rank), "2", "127.0.0.1", str(port)), strict=True))


def start(workspace: Path, *words: str, run: Callable[[], int] = main, name: str = "primus-odc", **variables: str) -> Program:
    """``primus-odc train`` with the smoke configuration, as one process."""
    return Program(run, "train", str(SMOKE), *words, folder=workspace, name=name, environment={**environment(workspace), **variables})


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_killed_launcher_leaves_no_rank_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ["--comm_backend", "odc_nopad", *DATA, "--eval_interval", "1", "--train_iters", "9000", "--lr_decay_iters", "9000"]
    words += ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"), "--save_interval", "1", "odc.timeout_s=40"]
    command = [sys.executable, *TORCHRUN, "-m", "primus_odc", "train", str(SMOKE), *words]
    folder = tmp_path / "primus_odc" / "local" / "smoke"
    log = folder / "steps.jsonl"
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen(command, env=environment(tmp_path), stdout=out, stderr=out)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (log.exists() and log.read_text().count("\n") > 2):
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        ranks = children(launcher.pid)
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait(timeout=30)
    assert all(gone(pid) for pid in ranks)
    steps = len(read_step_log(log).steps)

    command += ["--exit_interval", "1"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    saved = int((tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text())
    told = ("arm odc_nopad on 2 ranks", "3 FSDP2 units", f"step {saved}/9000 | loss", f"validation after step {saved}", "saved")
    for part in (*told, f"continuing after step {saved - 1}"):
        assert done.stdout.count(part) == 1, (part, done.stdout)
    after = read_step_log(folder)
    assert after.header.arm == "odc_nopad" and after.header.world_size == 2 and not after.torn
    assert 1 < saved == len(after.steps) <= steps + 1
    losses = [step.loss for step in after.steps]
    assert all(loss is not None and 2 < loss < 7 for loss in losses) and losses[0] is not None and losses[0] > 4
    assert all(step.ms > 0 and len(step.microbatches) == 2 and len(step.waited_s) == 2 for step in after.steps)


def broken_on_purpose() -> int:
    from primus_odc.megatron import arm

    original = arm.Arm.train_step

    def train_step(self: arm.Arm, minibatch: Any, recorder: Any = None) -> Any:
        if self.rank == 1 and minibatch.step == 1:
            raise RuntimeError("broken on purpose")
        return original(self, minibatch, recorder)

    arm.Arm.train_step = train_step  # type: ignore[method-assign]  # in a process of its own
    return main()


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_failing_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    # Without torchrun, which would end the other rank itself.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("--comm_backend", "odc_pad", *DATA, "odc.timeout_s=40")
    ranks = [start(tmp_path, *words, run=broken_on_purpose, name=f"rank{rank}", **rank_of_two(rank, port)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.wait(TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.kill()
    errors = [rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 1], errors
    assert "broken on purpose" in errors[1] and "Traceback" in errors[1]
    assert errors[0].count("primus-odc: error: on rank 0: ") == 1 and "Traceback" not in errors[0], errors[0]
    assert "rank 1" in errors[0].partition("error: on rank 0: ")[2], errors[0]


@pytest.mark.timeout(TIMEOUT_S)
def test_what_all_ranks_find_is_told_once(tmp_path: Path) -> None:
    words = ("--comm_backend", "odc_nopd", "--hidden_size", "nan", "--lr", "0", "--sft_dataset_name", "absent.jsonl", "--trani_iters", "3")
    (tmp_path / "outputs").mkdir()
    first, second = (
        Program(
            main,
            *("train", str(SMOKE), *words),
            folder=tmp_path / "outputs",
            name=f"rank{rank}",
            environment={**environment(tmp_path / "workspace"), **rank_of_two(rank)},
        )
        for rank in range(2)
    )
    try:
        first.wait(TIMEOUT_S / 2)
        assert first.returncode == 2
    finally:
        second.kill()  # as torchrun does when the first has failed
    assert first.stderr.count("primus-odc: error: ") == 1, first.stderr
    for key in ("comm_backend: ", "hidden_size: ", "min_lr ", "sft_dataset_name ", "trani_iters "):
        assert first.stderr.count(f"  - {key}") == 1, (key, first.stderr)
    assert second.returncode == -signal.SIGKILL and "primus-odc: error" not in second.stderr
    assert not (tmp_path / "workspace").exists()


def test_unusable_data_are_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    words = ("--comm_backend", "odc_nopad", "--sft_dataset_name", str(tmp_path / "bad.jsonl"), "--eval_iters", "0")
    alone = start(tmp_path, *words)
    alone.wait(TIMEOUT_S / 2)
    assert alone.returncode == 2
    assert "primus-odc: error: sample 'bad.jsonl:1'" in alone.stderr and "Traceback" not in alone.stderr


@pytest.mark.timeout(TIMEOUT_S)
def test_one_process_that_is_interrupted_says_so(tmp_path: Path) -> None:
    alone = start(tmp_path, "--comm_backend", "odc_nopad", *DATA, "--eval_iters", "0", "--train_iters", "9000", "--lr_decay_iters", "9000")
    end_by(signal.SIGINT, alone, "step 2/", within_s=TIMEOUT_S - 30, ends_in_s=20)
    assert alone.returncode == 130
    assert alone.stderr.endswith("primus-odc: interrupted\n") and "Traceback" not in alone.stderr


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


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_one_process_has_one_thread_as_under_torchrun_and_says_so_and_when_it_has_nothing_to_do(tmp_path: Path) -> None:
    words = ["--comm_backend", "odc_nopad", *DATA, "--eval_iters", "0", "--train_iters", "1"]
    words += ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c")]
    words += ["--lr_decay_iters", "1", "--lr_warmup_iters", "0"]
    inherited = {key: value for key, value in environment(tmp_path).items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "primus_odc", "train", str(SMOKE), *words]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=TIMEOUT_S - 10, check=False)
    assert done.returncode == 0, done.stderr
    assert "arm odc_nopad on 1 rank of 1 thread each (OMP_NUM_THREADS)" in done.stdout
    assert "\n1 minibatch of 8 samples; log: " in done.stdout
    assert read_step_log(tmp_path / "primus_odc" / "local" / "smoke").header.machine["torch_threads"] == 1
    assert "nothing is left" not in done.stdout

    done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=TIMEOUT_S - 10, check=False)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step 1 from {tmp_path / 'c'}; train_iters is 1, so nothing is left to train" in done.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_check_says_once_that_all_is_well(
    rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMUS_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("RANK", rank)
    assert run_train(arguments("--check", str(SMOKE), "--comm_backend", "odc_pad")) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == (rank == "0")
    assert rank == "1" or (said.startswith(f"{SMOKE}: nothing wrong for odc_pad in keys") and str(tmp_path) in said)
    assert rank == "1" or "; there are samples enough for a step, whether all can be used is known when training starts; " in said


def test_check_trains_nothing_and_refuses_what_training_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMUS_WORKSPACE", str(tmp_path))
    words = ("--check", str(SMOKE), "--comm_backend", "odc_pad")
    assert run_train(arguments(*words)) == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    with pytest.raises(ConfigError, match="needs a GPU for the one process of this host and torch sees 0; set distributed_backend: gloo"):
        run_train(arguments(*words, "--distributed_backend", "nccl"))
    assert "nothing wrong" not in capsys.readouterr().out
    # Ten thousand definitions are more than the library has; with too many the wrong key is told along.
    with pytest.raises(
        ConfigError, match=r"(?s)2 problems.*trani_iters .*global_batch_size: 99999 is more than the \d+ samples to train on"
    ):
        run_train(arguments(*words, "--global_batch_size", "99999", "--trani_iters", "3"))
    with pytest.raises(ConfigError, match=r"the validation part of standard library, by definition is empty: 40 samples"):
        run_train(arguments(*words, "--sft_max_samples", "40", "--sft_validation_fraction", "1e-9"))
    assert not list(tmp_path.iterdir())
    run = tmp_path / "primus_odc" / "local" / "smoke"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text("header\nstep\n")
    with pytest.raises(ConfigError, match=r"steps\.jsonl is the log of another run"):
        run_train(arguments(*words))
    assert run_train(arguments(*words, "--exp_name", "second")) == 0
