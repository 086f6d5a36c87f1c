"""Run a function on N real processes joined by gloo, and get every rank's result (or its traceback) back; and run a program as a process.

The processes are forked from a server that has torch and megatron-core imported already, so starting a set costs tens of milliseconds.
Every worker ends with a barrier, a flush and ``os._exit``: a process that leaves through the interpreter's finalisation right after a gloo
collective aborts in a few per cent of runs.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

# One server serves every test of this process, and what it imports is fixed when it starts: no test makes a context of its own.
FORK_SERVER = mp.get_context("forkserver")
# megatron-core takes seconds to import: once in the server, instead of once in every worker.
FORK_SERVER.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "primus_odc.fsdp.engine", "primus_odc.megatron.trainer", "tests.workers"]
)


class WorkerFailedError(AssertionError):
    """A worker raised; ``tracebacks`` holds ``{rank: text}`` and ``codes`` every exit code (None: killed by the time limit)."""

    def __init__(self, tracebacks: dict[int, str], codes: list[int | None]) -> None:
        self.tracebacks = tracebacks
        self.codes = codes
        super().__init__(f"exit codes {codes}\n" + "\n".join(f"--- rank {r} ---\n{t}" for r, t in sorted(tracebacks.items())))


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 50.0,
    gpu: bool = False,
    first: Callable[[int], None] | None = None,
) -> list[Any]:
    """``[function(rank, world_size, *args) for every rank]``, each in its own process with gloo initialised, with ``gpu`` NCCL too and a
    GPU each; ``first(rank)`` is called before that. Where there are fewer GPUs than ranks, ranks share them, and gloo serves them there
    (NCCL 2.29 and before takes no two ranks of one GPU).

    Raises:
        WorkerFailedError: some worker raised, died or did not end in time; all are ended then.
    """
    context = mp.get_context("spawn") if gpu else FORK_SERVER  # CUDA does not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_main, args=(function, r, world_size, folder, args, timeout_s, gpu, first), daemon=True)
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
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    timeout_s: float,
    gpu: bool,
    first: Callable[[int], None] | None,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  # stays open for the process's life
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=True, file=stack)
    code = 0
    try:
        if first is not None:
            first(rank)
        backend = "gloo"
        if gpu:
            found = torch.cuda.device_count()
            torch.cuda.set_device(rank % found)
            backend = "cpu:gloo,cuda:nccl"
            if found < world_size:
                backend = "cpu:gloo,cuda:gloo"
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        _use_one_gloo_thread()
        dist.init_process_group(
            backend,
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


def _use_one_gloo_thread() -> None:
    """Give every gloo group that this process makes one thread instead of two, which may damage the heap in ``DTensor.full_tensor()``
    (:func:`primus_odc.fsdp.native.whole` says how). Tests gather thousands of parameters so."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_one_thread(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options, interface = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_one_thread


class Program:
    """``main`` as a process that ends like a script: its own environment and arguments, both outputs in files, exit handlers run.

    Cheaper than ``python -m`` by the imports of the server.
    """

    def __init__(
        self, main: Callable[[], int | None], *words: str, folder: Path, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._outputs = [folder / f"{name}.{stream}" for stream in ("stdout", "stderr")]
        arguments = (main, [name, *words], dict(os.environ if environment is None else environment), self._outputs)
        self._process = FORK_SERVER.Process(target=_run_program, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._outputs[0].read_text() if self._outputs[0].exists() else ""

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text() if self._outputs[1].exists() else ""

    def until(self, words: str, timeout_s: float) -> None:
        """Wait until one of its outputs holds ``words``."""
        deadline = time.monotonic() + timeout_s
        while words not in self.stdout and words not in self.stderr:
            if self.returncode is not None or time.monotonic() > deadline:
                raise AssertionError(f"exit status {self.returncode} without {words!r}:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; it is killed if that does not come in time."""
        self._process.join(timeout_s)
        if self.returncode is None:
            self.send(signal.SIGKILL)
            self._process.join(10)
            raise AssertionError(f"no end in {timeout_s:g} s:\n{self.stdout}\n{self.stderr}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; one that has ended is left alone."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, also where it is stopped."""
        self.send(signal.SIGKILL)
        self._process.join(10)


def _run_program(main: Callable[[], int | None], words: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    # A shell that runs the tests in the background has them ignore SIGINT, and so what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words
    code: int | str | None = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001  # what the interpreter does with it
        sys.last_type = type(error)
        traceback.print_exc()
    atexit._run_exitfuncs()  # a forked process would end without them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))
