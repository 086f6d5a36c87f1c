"""What stands last when torchrun ends: the reason of the rank that failed, or that it was interrupted."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from primus_odc.megatron.launcher import main
from tests.megatron.test_local_ranks import end_by, gone
from tests.megatron.test_train_command import DATA, SMOKE, TIMEOUT_S, environment
from tests.workers import Program

REASON = "import sys; from primus_odc.megatron.launcher import leave_reason; leave_reason('no such\\nluck'); sys.exit(5)"
SLEEP = "import time; print('sleeping', flush=True); time.sleep(60)"


def launch() -> int:
    return main(sys.argv[1:])


def start(folder: Path, *words: str, ranks: int = 2) -> Program:
    words = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), *words)
    return Program(launch, *words, folder=folder, name="launcher", environment=environment(folder))


@pytest.mark.parametrize(
    ("program", "code", "told"),
    [
        (REASON, 5, "primus-odc: error: no such\nluck\n"),
        ("import sys; sys.exit(3)", 3, "primus-odc: error: rank 0 failed with exit status 3; what it wrote stands above\n"),
        ("import os; os.kill(os.getpid(), 9)", 1, "primus-odc: error: rank 0 was killed by SIGKILL; what it wrote stands above\n"),
        ("pass", 0, ""),
    ],
)
def test_the_reason_stands_below_the_report_of_torchrun(program: str, code: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(program)
    launcher = start(tmp_path, str(tmp_path / "rank.py"), ranks=1)
    launcher.wait(50)
    assert launcher.returncode == code, launcher.stderr
    assert launcher.stderr.endswith(f"{'=' * 60}\n{told}" if code else "") and launcher.stderr.count("FAILED") == (code != 0)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("sent", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_signal_is_told_without_a_traceback(sent: signal.Signals, told: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SLEEP)
    launcher = start(tmp_path, str(tmp_path / "rank.py"), ranks=1)
    ranks = end_by(sent, launcher, "sleeping", within_s=50, ends_in_s=20)
    assert launcher.returncode == 128 + sent
    assert launcher.stderr.endswith(f"\nprimus-odc: {told}\n") and "SignalException" not in launcher.stderr
    assert len(ranks) == 1 and gone(ranks[0])


@pytest.mark.timeout(TIMEOUT_S)
def test_unusable_data_have_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    words = ("--comm_backend", "odc_nopad", "--sft_dataset_name", str(tmp_path / "bad.jsonl"), "--eval_iters", "0")
    launcher = start(tmp_path, "-m", "primus_odc", "train", str(SMOKE), *words)
    launcher.wait(TIMEOUT_S - 20)
    assert launcher.returncode == 2
    assert "ChildFailedError" in launcher.stderr
    assert launcher.stderr.splitlines()[-1].startswith("primus-odc: error: sample 'bad.jsonl:1'"), launcher.stderr


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("arm", ["nccl_pad", "odc_nopad"])
def test_interrupted_training_says_so_once_and_leaves_no_rank(arm: str, tmp_path: Path) -> None:
    words = ("--comm_backend", arm, *DATA, "--eval_iters", "0", "--train_iters", "9000", "--lr_decay_iters", "9000")
    launcher = start(tmp_path, "-m", "primus_odc", "train", str(SMOKE), *words)
    ranks = end_by(signal.SIGINT, launcher, "step 2/", within_s=TIMEOUT_S - 40, ends_in_s=40)
    assert launcher.returncode == 130
    assert launcher.stderr.endswith("\nprimus-odc: interrupted\n") and launcher.stderr.count("interrupted") == 1
    assert "Traceback" not in launcher.stderr, launcher.stderr
    assert len(ranks) == 2 and all(gone(pid) for pid in ranks)
