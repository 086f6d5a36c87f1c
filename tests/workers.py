"""Run a function on N real processes joined by gloo, and get every rank's result (or its traceback) back.

The processes are forked from a server that has torch and megatron-core imported already, so starting a set costs tens of milliseconds.
Every worker ends with a barrier, a flush and ``os._exit``: a process that leaves through the interpreter's finalisation right after a gloo
collective aborts in a few per cent of runs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_CONTEXT = mp.get_context("forkserver")
# megatron-core takes seconds to import: once in the server, instead of once in every worker.
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "primus_odc.fsdp.engine", "primus_odc.megatron.model"]
)


class WorkerFailedError(AssertionError):
    """A worker raised; ``tracebacks`` holds ``{rank: text}`` and ``codes`` every exit code (None: killed by the time limit)."""

    def __init__(self, tracebacks: dict[int, str], codes: list[int | None]) -> None:
        self.tracebacks = tracebacks
        self.codes = codes
        super().__init__(f"exit codes {codes}\n" + "\n".join(f"--- rank {r} ---\n{t}" for r, t in sorted(tracebacks.items())))


def run_workers(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 50.0, gpu: bool = False) -> list[Any]:
    """``[function(rank, world_size, *args) for every rank]``, each in its own process with gloo initialised, with ``gpu`` NCCL too and a
    GPU each.

    Raises:
        WorkerFailedError: some worker raised, died or did not end in time; all are ended then.
    """
    context = mp.get_context("spawn") if gpu else _CONTEXT  # CUDA does not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_main, args=(function, r, world_size, folder, args, timeout_s, gpu), daemon=True)
            for r in range(world_size)
        ]
        for w in workers:
            w.start()
        deadline = time.monotonic() + timeout_s
        for w in workers:
            w.join(max(0.0, deadline - time.monotonic()))
        codes = [w.exitcode for w in workers]
        for w in workers:
            if w.exitcode is None:
                w.kill()
                w.join(10)
        results, tracebacks = [], {}
        for r in range(world_size):
            file, stack = Path(folder) / f"result{r}", Path(folder) / f"stack{r}"
            if file.exists():
                ok, value = pickle.loads(file.read_bytes())
            else:
                ok, value = False, "no result: the process was killed or stuck\n" + (stack.read_text() if stack.exists() else "")
            if ok:
                results.append(value)
            else:
                tracebacks[r] = value
        if tracebacks or any(codes):
            raise WorkerFailedError(tracebacks, codes)
        return results


def _main(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...], timeout_s: float, gpu: bool
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  # stays open for the process's life
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=True, file=stack)
    code = 0
    try:
        if gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        outcome = (True, function(rank, world_size, *args))
        dist.barrier()
    except BaseException:  # noqa: BLE001  # whatever it is, the parent process reports it
        outcome, code = (False, traceback.format_exc()), 1
    partial = Path(folder) / f"partial{rank}"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder) / f"result{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
