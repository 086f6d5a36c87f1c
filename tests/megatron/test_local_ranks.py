from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from primus_odc.errors import OdcError
from primus_odc.megatron import local_ranks
from primus_odc.megatron.local_ranks import run_ranks
from tests.workers import Program

PROGRAM = "tests.megatron.rank_program"
ROOT = Path(__file__).parents[2]


def pids(folder: Path, world_size: int) -> list[int]:
    """Process ids of all ranks, once they run."""
    deadline = time.monotonic() + 30
    while not all((folder / f"pid{rank}").exists() for rank in range(world_size)):
        assert time.monotonic() < deadline, "the ranks have not started"
        time.sleep(0.02)
    return [int((folder / f"pid{rank}").read_text()) for rank in range(world_size)]


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end_by(number: signal.Signals, program: Program, said: str, *, within_s: float, ends_in_s: float) -> list[int]:
    """Send ``program`` a signal as soon as it has said ``said``, and wait for its end; the children that it had."""
    try:
        program.until(said, within_s)
        ranks = children(program.pid)
        program.send(number)
        program.wait(ends_in_s)
    finally:
        program.kill()
    return ranks


def gone(pid: int) -> bool:
    """Whether the process ended, within a few seconds; a zombie did."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def run(folder: Path, *words: str, silence_s: float = 30.0) -> list[str]:
    lines: list[str] = []
    run_ranks(PROGRAM, [str(folder), *words], 3, silence_s=silence_s, progress=lines.append)
    return lines


def test_ranks_that_say_the_same_are_told_together(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(4)]
    noise = "07:16:08 a library says something on this rank alone\n\n=== this rank ends because:\n"
    for log, text in zip(logs, ["wrong key\n", "fine\n", noise + "wrong key\n", "other\n"], strict=True):
        log.write_text(text)
    assert local_ranks._failure([2, 0, 2, 2], logs, None) == (
        "ranks 0, 2 failed with exit status 2:\n  wrong key\nrank 3 failed with exit status 2:\n  other"
    )


def test_progress_is_rank_0s_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run(tmp_path) == ["rank 0 speaks"]
    assert all(gone(pid) for pid in pids(tmp_path, 3))


@pytest.mark.parametrize(
    ("fault", "who", "told"),
    [("fail", 1, "rank 1 failed with exit status 3:\n  rank 1 speaks\n  the reason of it"), ("kill", 0, "rank 0 was killed by SIGKILL")],
)
def test_a_failed_rank_is_named_and_ends_the_others(
    fault: str, who: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.5)
    with pytest.raises(OdcError) as error:
        run(tmp_path, fault, str(who))
    assert told in str(error.value)
    other = 2
    assert f"rank {other} did not end and was ended" in str(error.value)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("pid*"))


def test_silence_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(OdcError, match=r"made no progress for 3 s"):
        run(tmp_path, "wait", "0", silence_s=3)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("pid*"))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them(sent: signal.Signals, tmp_path: Path) -> None:
    script = (
        # A shell that runs the tests in the background has them ignore SIGINT, and so what they start.
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from primus_odc.megatron.local_ranks import run_ranks\n"
        f"run_ranks({PROGRAM!r}, [sys.argv[1], 'wait', '0'], 2, silence_s=60, progress=print)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = pids(tmp_path, 2)
    os.kill(parent.pid, sent)
    assert parent.wait(timeout=30) != 0
    assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_only_ranks_of_torchrun_end_with_it(by_torchrun: bool, tmp_path: Path) -> None:
    rank = (
        "import time\nfrom primus_odc.megatron.local_ranks import end_with_launcher\nend_with_launcher()\nprint(flush=True)\ntime.sleep(60)"
    )
    script = (
        "import subprocess, sys, time\nrank = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "rank.stdout.readline()\nprint(rank.pid, flush=True)\ntime.sleep(60)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    if by_torchrun:
        environment["TORCHELASTIC_RUN_ID"] = "none"
    with (tmp_path / "errors").open("w") as errors:
        launcher = subprocess.Popen(
            [sys.executable, "-c", script, rank], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert launcher.stdout is not None
    with launcher.stdout:
        pid = int(launcher.stdout.readline())
        launcher.kill()
        launcher.wait(timeout=30)
    if by_torchrun:
        assert gone(pid)
        assert f"torchrun (process {launcher.pid}) is gone" in (tmp_path / "errors").read_text()
    else:
        time.sleep(3 * local_ranks.LAUNCHER_POLL_S)
        os.kill(pid, signal.SIGKILL)  # raises where it has ended
        assert gone(pid)
