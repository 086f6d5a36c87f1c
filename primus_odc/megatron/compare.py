"""Run the arms of a comparison on this host's ranks.

``primus-odc compare`` is one process that starts its ranks itself, waits for them and reads what rank 0 measured; see
:mod:`primus_odc.megatron.rounds` for what they do. It imports neither torch nor megatron-core, unless GPUs have to be counted, or
something is wrong with the experiment anyway and the model's keys are checked along. It is not launched by torchrun: all ranks must share
one host and one clock, and a process of its own outlives a rank that dies and can say which one it was.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from primus_odc.config import parse_odc
from primus_odc.errors import ConfigError
from primus_odc.experiment import load_experiment
from primus_odc.megatron.compare_job import Job, arm_params
from primus_odc.megatron.local_ranks import run_ranks
from primus_odc.megatron.run_options import require_checked
from primus_odc.megatron.train_config import normalise

MOST_DEFAULT_RANKS = 4
WORKER = "primus_odc.megatron.compare_worker"


def run_job(
    config: Path,
    *,
    overrides: Sequence[str],
    arms: Sequence[str],
    steps: int | None,
    nproc: int | None,
    command: str,
    result: Path,
    before_start: Callable[[], object] = lambda: None,
    **rest: Any,
) -> None:
    """Start the ranks, which train every arm of ``arms`` on the same minibatches and ``ideal`` beside them, and wait for them.

    Args:
        config: experiment YAML; ``comm_backend`` in it is of no account.
        overrides: words that change it.
        arms: reporting names.
        steps: of every arm; None: ``train_iters`` of the experiment.
        nproc: ranks; None: the smaller of cores and 4, or all GPUs with ``distributed_backend: nccl``.
        command: the command line, for the report.
        result: file that rank 0 writes the result to.
        before_start: called when everything is checked, before a rank is started; what it raises ends the job.
        rest: further fields of :class:`Job`, for what else the ranks can do.

    Raises:
        ConfigError: wrong keys, or ranks started by somebody else.
        OdcError: a rank failed; the message holds what it said.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(["this command starts its ranks itself: run it without torchrun, and say how many ranks with --nproc"])
    experiment = load_experiment(config, list(overrides))
    params = normalise(experiment.params)
    require_checked(experiment, arm_params(params, arms[0]))
    on_gpus = params.get("distributed_backend") == "nccl"
    timeout_s = max(parse_odc(arm_params(params, arm)).odc.timeout_s for arm in arms)
    world_size = _gpus(nproc) if on_gpus else nproc or min(len(os.sched_getaffinity(0)), MOST_DEFAULT_RANKS)
    before_start()
    with tempfile.TemporaryDirectory(prefix="primus-odc-") as folder:
        job = Job(
            config=str(config),
            overrides=list(overrides),
            arms=list(arms),
            steps=steps,
            world_size=world_size,
            on_gpus=on_gpus,
            store=str(Path(folder) / "store"),
            result=str(result),
            command=command,
            **rest,
        )
        file = Path(folder) / "job.json"
        job.write(file)
        # A rank that waits for another one says so itself, after timeout_s; longer silence means that none can.
        run_ranks(WORKER, [str(file)], world_size, silence_s=2 * timeout_s, progress=_show)


def _gpus(nproc: int | None) -> int:
    """Ranks, each on a GPU of its own."""
    found = int(importlib.import_module("torch").cuda.device_count())
    if found < (nproc or 1):
        raise ConfigError(
            [
                f"distributed_backend: nccl needs a GPU for each of {nproc or 1} ranks and torch sees {found}; start fewer (--nproc), or "
                "set distributed_backend: gloo to compare on the CPU"
            ]
        )
    return nproc or found


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
