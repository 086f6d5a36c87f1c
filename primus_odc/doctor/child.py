"""The parent's side of the child process: every stage has a time limit, and one that breaks or hangs costs its own findings only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from primus_odc.doctor.finding import Finding, Severity, from_dict
from primus_odc.doctor.job import Job


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    """One stage of :mod:`primus_odc.doctor.stages`."""

    name: str
    check: str
    """How its findings are called where it gives none."""
    limit_s: float
    """Of a whole limit of 20 s; imports are part of the stage that makes them."""
    broken: Severity = "problem"
    """How bad it is when the stage dies. That it took too long is a note: a slow file system keeps no run from starting."""


STAGES = (
    Stage(name="packages", check="packages", limit_s=14),
    Stage(name="gpus", check="GPUs", limit_s=12),
    Stage(name="run", check="configuration", limit_s=12),
    Stage(name="memory", check="engine memory", limit_s=8, broken="note"),
)
COMMAND = (sys.executable, "-m", "primus_odc.doctor.stages")
_MACHINE_ONLY = ("packages", "gpus")
_MORE_TIME = "primus-odc doctor --time-limit 120"


def run_stages(job: Job, environment: Mapping[str, str], scale: float, deadline: float) -> list[Finding]:
    """Run the stages that ``job`` needs and return their findings.

    Args:
        job: its ``facts`` are filled in.
        environment: of the child.
        scale: multiplies every stage's limit.
        deadline: of all together, on the clock of :func:`time.monotonic`.
    """
    left = [stage for stage in STAGES if job.config is not None or stage.name in _MACHINE_ONLY]
    findings: list[Finding] = []
    while left and time.monotonic() < deadline:
        with tempfile.TemporaryFile() as errors:
            findings += _one_child(left, job, environment, errors, scale, deadline)
    findings += [Finding(check=stage.check, severity="note", found="not checked: no time was left", setting=_MORE_TIME) for stage in left]
    return findings


def _one_child(
    left: list[Stage], job: Job, environment: Mapping[str, str], errors: IO[bytes], scale: float, deadline: float
) -> list[Finding]:
    """Run ``left`` in one process until the first stage that fails; stages that were run are removed from it."""
    read_end, write_end = os.pipe()
    process = _start(left, job, environment, write_end, errors)
    os.close(write_end)
    findings: list[Finding] = []
    try:
        with _Lines(read_end) as lines:
            while left:
                limit_s = min(left[0].limit_s * scale, deadline - time.monotonic())
                line = lines.next(limit_s)
                stage = left.pop(0)
                if not line:
                    findings.append(_failure(stage, timed_out=line is None, limit_s=limit_s, errors=errors))
                    break
                answer: dict[str, Any] = json.loads(line)
                job.facts.update(answer["facts"])
                findings += [from_dict(item) for item in answer["findings"]]
    finally:
        _end(process)
    return findings


def _start(stages: Sequence[Stage], job: Job, environment: Mapping[str, str], write_end: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*COMMAND, str(write_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[write_end],
        env=dict(environment),
        start_new_session=True,  # ended as a whole, whatever it started
    )
    assert process.stdin is not None
    with process.stdin as order:
        order.write(json.dumps({"stages": [stage.name for stage in stages], "job": asdict(job)}).encode())
    return process


def _end(process: subprocess.Popen[bytes], patience_s: float = 1.0) -> None:
    """End the process and what it started; one that sits in a driver and cannot be ended is left to the system."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


class _Lines:
    """Lines from a pipe, with time limits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def next(self, limit_s: float) -> bytes | None:
        """The next line; empty where the other end was closed, None where none came within ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._descriptor, 1 << 16)
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _failure(stage: Stage, *, timed_out: bool, limit_s: float, errors: IO[bytes]) -> Finding:
    if timed_out:
        return Finding(check=stage.check, severity="note", found=f"not checked: no answer within {limit_s:.1f} s", setting=_MORE_TIME)
    errors.seek(0)
    said = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return Finding(
        check=stage.check,
        severity=stage.broken,
        found=f"the check died: {said[-1] if said else 'without a word'}",
        setting="try the same import or call by hand; ODC_SKIP_DOCTOR=1 lets scripts/run_odc.sh start without these checks",
    )
