"""T18: one rank is killed in a minibatch. Naive code spins for ever.

Right: all others fail within the time-out, naming rank, group, operation and epoch, with an exit code that is not 0; nothing is left
behind, and the next run starts. The ranks are plain processes: no elastic agent kills the witnesses.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 10.0


def _start(folder: Path, mode: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cases.killed_worker", str(r), "3", str(folder / "store"), mode, str(TIMEOUT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for r in range(3)
    ]


def _sockets(workers: list[subprocess.Popen[str]]) -> set[str]:
    """Inodes of every socket the workers hold."""
    links = [os.readlink(fd) for w in workers for fd in Path(f"/proc/{w.pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _leftovers(sockets: set[str]) -> list[str]:
    """Of those sockets, the ones the kernel still knows; and anything of ours with a name in /dev/shm."""
    known = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[6] in sockets]
    return known + [str(f) for f in Path("/dev/shm").glob("*primus_odc*")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["local", "owner"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_end_and_name_it(tmp_path: Path, mode: str, how: signal.Signals) -> None:
    workers = _start(tmp_path, mode)
    try:
        for w in workers:
            assert w.stdout is not None
            assert w.stdout.readline().startswith("running"), w.communicate(timeout=10)[1]
        sockets = _sockets(workers)
        assert len(_leftovers(sockets)) >= 4  # the check below can see them
        start = time.monotonic()
        workers[1].send_signal(how)
        outputs = [workers[r].communicate(timeout=4 * TIMEOUT_S)[1] for r in (0, 2)]
        if how is signal.SIGKILL:
            assert time.monotonic() - start < TIMEOUT_S  # noticed as a death, not waited for
        for r, text in zip((0, 2), outputs, strict=True):
            assert workers[r].returncode not in (0, None)
            last = next(line for line in reversed(text.splitlines()) if "Error: rank" in line)
            assert "rank 1" in last, text
            assert re.search(r"(settle|gather|push|publish|begin_minibatch|reduction|forward) of (all groups|group \S+)", last), text
            if how is signal.SIGKILL:
                assert "PeerError" in last and ("died" in last or "aborted" in last), text
            else:
                assert "no sign of life" in last, text
            assert re.search(r"epoch \d+", last) and "group" in last, text
    finally:
        for w in workers:
            w.kill()
            w.wait(10)
    assert _leftovers(sockets) == []


@pytest.mark.timeout(60)
def test_the_next_run_starts(tmp_path: Path) -> None:
    workers = _start(tmp_path, "local")
    try:
        for w in workers:
            assert w.stdout is not None
            assert w.stdout.readline().startswith("running")
        sockets = _sockets(workers)
    finally:
        for w in workers:
            w.kill()
            w.wait(10)
    assert _leftovers(sockets) == []
