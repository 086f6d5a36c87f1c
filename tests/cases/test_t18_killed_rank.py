"""T18: one rank is killed in a minibatch. Naive code spins for ever.

Right: all others fail within the time-out, naming rank, group, operation and epoch, with an exit code that is not 0; nothing is left
behind, and the next run starts. The ranks are plain processes: no elastic agent kills the witnesses.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cases.killed_worker import main
from tests.symmetric.hosts import two_hosts
from tests.workers import Program

TIMEOUT_S = 6.0
"""Many times a step, also on a busy machine."""
START_S = 40.0


@contextmanager
def _job(folder: Path, mode: str) -> Iterator[list[Program]]:
    """Three ranks (``nodes``: two nodes of two), each some steps into its training; afterwards they have ended and nothing is left."""
    ranks = 4 if mode == "nodes" else 3
    words = (str(ranks), str(folder / f"store-{mode}"), mode, str(TIMEOUT_S))
    workers = [Program(main, str(rank), *words, folder=folder, name=f"{mode}{rank}") for rank in range(ranks)]
    sockets: set[str] = set()
    try:
        for w in workers:
            w.until("running", START_S)
        sockets = _sockets(workers)
        assert len(_leftovers(sockets)) >= 4  # the check below can see them
        yield workers
    finally:
        for w in workers:
            w.kill()
    assert _leftovers(sockets) == []


def _sockets(workers: list[Program]) -> set[str]:
    """Inodes of every socket the workers hold."""
    links = [os.readlink(fd) for w in workers for fd in Path(f"/proc/{w.pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _leftovers(sockets: set[str]) -> list[str]:
    """Of those sockets, the ones the kernel still knows; and anything of ours with a name in /dev/shm."""
    known = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[6] in sockets]
    return known + [str(f) for f in Path("/dev/shm").glob("*primus_odc*")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_end_and_name_it(tmp_path: Path, how: signal.Signals) -> None:
    with ExitStack() as stack:
        jobs = [stack.enter_context(_job(tmp_path, mode)) for mode in ("local", "owner", "nodes")]
        start = time.monotonic()
        for workers in jobs:
            workers[1].send(how)
        for workers in jobs:
            for witness in (workers[0], *workers[2:]):
                witness.wait(4 * TIMEOUT_S)
                if how is signal.SIGKILL:
                    assert time.monotonic() - start < TIMEOUT_S  # noticed as a death, not waited for
                _check_witness(witness, how)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_end_and_name_it_on_two_machines(tmp_path: Path, how: signal.Signals) -> None:
    with two_hosts() as hosts:
        words = ("4", str(tmp_path / "store"), "machines", str(TIMEOUT_S), *hosts)
        workers = [Program(main, str(rank), *words, folder=tmp_path, name=f"machines{rank}") for rank in range(4)]
        try:
            for w in workers:
                w.until("running", START_S)
            start = time.monotonic()
            workers[1].send(how)
            for witness in (workers[0], *workers[2:]):
                witness.wait(4 * TIMEOUT_S)
                if how is signal.SIGKILL:
                    assert time.monotonic() - start < TIMEOUT_S
                _check_witness(witness, how)
        finally:
            for w in workers:
                w.kill()


def _check_witness(witness: Program, how: signal.Signals) -> None:
    assert witness.returncode not in (0, None)
    text = witness.stderr
    last = next(line for line in reversed(text.splitlines()) if "Error: rank" in line)
    assert "rank 1" in last, text
    assert re.search(r"(settle|gather|push|publish|begin_minibatch|reduction|forward) of (all groups|group \S+)", last), text
    if how is signal.SIGKILL:
        assert "PeerError" in last and ("died" in last or "aborted" in last), text
    else:
        assert "no sign of life" in last, text
    assert re.search(r"epoch \d+", last) and "group" in last, text


def test_the_next_run_starts(tmp_path: Path) -> None:
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        with _job(tmp_path / run, "local") as workers:
            workers[1].kill()
