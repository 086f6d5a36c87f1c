"""``primus-odc`` with ranks that are forked instead of started: the same processes, pipes and signals without seconds of imports each.

For tests of what ranks do and of what becomes of them. That they start as programs is tested in tests/megatron/test_local_ranks.py and by
one comparison and one benchmark.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO

from primus_odc.cli import main
from primus_odc.megatron import local_ranks

_OURS: list[int] = []
"""The ends of all ranks' pipes that this process keeps."""


class ForkedRank:
    """What :func:`primus_odc.megatron.local_ranks.run_ranks` needs of ``subprocess.Popen([python, "-m", module, *words], ...)``."""

    def __init__(self, command: Sequence[str], *, stdin: int, stdout: int | IO[str], stderr: IO[str], text: bool, start_new_session: bool):
        assert command[1] == "-m" and stdin == subprocess.PIPE and text and start_new_session
        self._status: int | None = None
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(read_in, 0)
            os.dup2(write_out if stdout == subprocess.PIPE else stderr.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            for end in [*_OURS, write_in, read_out]:  # no rank may hold the other end of a standard input
                os.close(end)
            _run_module(command[2], command[3:])
        _OURS.extend([write_in, read_out])
        os.close(read_in)
        os.close(write_out)
        self.stdin = os.fdopen(write_in, "w")
        self.stdout: IO[str] | None = os.fdopen(read_out, closefd=stdout == subprocess.PIPE)
        if stdout != subprocess.PIPE:
            self.stdout = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run_module(module: str, words: Sequence[str]) -> None:
    code: int | str | None = 1
    try:
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  # what the interpreter does with it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def main_with_forked_ranks() -> int:
    """For :class:`tests.workers.Program`, which is forked itself, from a process that has imported all there is to import."""
    local_ranks.subprocess = SimpleNamespace(Popen=ForkedRank, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    return main()
