"""Start the ranks of a job on this host, watch them, and leave none behind.

Each rank is a process of its own that runs a module as ``python -m MODULE RANK ARGUMENT...``. What holds them together:

* Standard input of a rank is a pipe that only this process can write to. :func:`end_with_parent` in the rank waits for its end, so that
  ranks end even if this process is killed.
* Standard output of rank 0 is the job's progress, passed on line by line; standard error of every rank is kept and shown where it failed.
* When a rank fails, the others get ``GRACE_S`` to notice and say so themselves, and are then killed. The same happens when no line of
  progress arrives in time, and on any exception here, Ctrl-C included.

torch's own launcher is not used: it gives the other ranks no time to say what they saw, and takes seconds to start. Ranks that it started
for a training run end with it by :func:`end_with_launcher`.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from primus_odc.errors import OdcError
from primus_odc.megatron.launcher import how_it_ended, started_by_torchrun

GRACE_S = 10.0
POLL_S = 0.05
LAUNCHER_POLL_S = 0.5
TAIL_LINES = 40
_REASON = "\n=== this rank ends because:\n"


GPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Transfers get hardware queues of their own, and memory is not fragmented by changing lengths."""


def prepare_gpu_environment() -> None:
    """Set :data:`GPU_ENVIRONMENT` where the caller has not; before CUDA is used."""
    for key, value in GPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def run_ranks(module: str, arguments: Sequence[str], world_size: int, *, silence_s: float, progress: Callable[[str], None]) -> None:
    """Run ``module`` in ``world_size`` processes and return when all have ended well.

    Args:
        module: what ``python -m`` runs; its arguments are the rank and then ``arguments``.
        silence_s: longest time without a line on rank 0's standard output, in seconds.
        progress: gets each such line, without its newline.

    Raises:
        OdcError: a rank failed or the job went silent; the message holds what the ranks wrote to standard error.
    """
    with tempfile.TemporaryDirectory(prefix="primus-odc-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as stderr:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, str(rank), *arguments],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE if rank == 0 else stderr,
                            stderr=stderr,
                            text=True,
                            # Out of the terminal's foreground group: Ctrl-C reaches this process alone, which ends the ranks in order.
                            start_new_session=True,
                        )
                    )
            silent = _watch(ranks, silence_s, progress)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
        if silent or any(codes):
            raise OdcError(_failure(codes, logs, silence_s if silent else None))


def tell_reason(error: OdcError) -> None:
    """In a rank: say why it ends, to be told by the process that started it."""
    print(f"{_REASON}{error}", file=sys.stderr)


def run_and_exit(work: Callable[[], None]) -> NoReturn:
    """In a rank: do ``work`` and end the process, with status 0, 2 for a refusal, which is told as such, or 1 for any other error."""
    code = 0
    try:
        work()
    except OdcError as error:
        tell_reason(error)
        code = 2
    except Exception:  # noqa: BLE001 - whatever it is, the process that started the ranks reports it
        traceback.print_exc()
        code = 1
    # Leaving through the interpreter's end right after a collective of gloo aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """In a rank: end this process at once when the one that started it is gone, or lets go of the pipe at standard input."""
    inherited = os.dup(0)

    def wait() -> None:
        while os.read(inherited, 64):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="primus-odc-parent", daemon=True).start()


def end_with_launcher() -> None:
    """In a process that torchrun started: end at once when torchrun is gone, also where it was killed and could end nobody.

    Other processes, one that a user started in a shell among them, outlive their parent as usual.
    """
    if not started_by_torchrun():
        return
    launcher = os.getppid()

    def wait() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_POLL_S)
        # The other end of standard error may be gone as well.
        with suppress(OSError):
            os.write(2, f"primus-odc: error: torchrun (process {launcher}) is gone, so rank {os.environ.get('RANK')} ends\n".encode())
        os._exit(1)

    threading.Thread(target=wait, name="primus-odc-launcher", daemon=True).start()


def _watch(ranks: Sequence[subprocess.Popen[str]], silence_s: float, progress: Callable[[str], None]) -> bool:
    """Wait until all ranks ended, or until it is of no use to wait longer; returns whether they had gone silent."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert ranks[0].stdout is not None
    reader = threading.Thread(target=_read, args=(ranks[0].stdout, lines), daemon=True)
    reader.start()
    heard = time.monotonic()
    failed_at: float | None = None
    while any(process.poll() is None for process in ranks):
        try:
            progress(lines.get(timeout=POLL_S))
            heard = time.monotonic()
        except queue.Empty:
            pass
        if failed_at is None and any(process.poll() for process in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            return False
        if time.monotonic() - heard > silence_s:
            return True
    reader.join(GRACE_S)
    while not lines.empty():
        progress(lines.get())
    return False


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))


def _failure(codes: Sequence[int | None], logs: Sequence[Path], silence_s: float | None) -> str:
    """What happened, rank by rank, with the end of what each failed one wrote."""
    parts = []
    if silence_s is not None:
        parts.append(f"the ranks made no progress for {silence_s:g} s and were ended")
    # Ranks that ended alike and wrote the same are told together: a wrong key is found by all of them.
    told: dict[tuple[str, ...], list[int]] = {}
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code != 0:
            # Of a rank that says why it ended, only that: libraries write lines with times and process ids before it.
            text = log.read_text(encoding="utf-8", errors="replace").rpartition(_REASON)[2]
            written = text.splitlines()[-TAIL_LINES:]
            told.setdefault((_ended(code), *written), []).append(rank)
    for (ended, *written), ranks in told.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"{who} {ended}" + (":" if written else ""))
        parts += [f"  {line}" for line in written]
    return "\n".join(parts)


def _ended(code: int | None) -> str:
    if code is None:
        return "did not end and was ended"
    return how_it_ended(code)
