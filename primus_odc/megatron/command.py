"""``primus-odc train CONFIG``: one process of a training run, under torchrun or alone.

Every process ends in ``os._exit``: after collectives over gloo, a process that leaves through the interpreter's finalisation aborts now
and then although all its work is done. A process that fails says why on stderr and ends with a code other than 0; on demand the others
notice by themselves, under collectives the launcher ends them.

A process that torchrun started ends with torchrun, however that ends.

What every process finds (a wrong key, unusable data) is told once: by the first process of each host. The others wait for the launcher
to end them, and speak only if it does not.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from primus_odc._arguments import take_overrides
from primus_odc.cli import EXIT_ERROR, EXIT_INTERRUPTED, tell, tell_interrupted
from primus_odc.data.build import is_hub_name
from primus_odc.data.enough import require_samples
from primus_odc.errors import ConfigError, DataError, OdcError, VersionError
from primus_odc.experiment import load_experiment
from primus_odc.megatron.launcher import leave_unforeseen, on_this_rank
from primus_odc.megatron.local_ranks import end_with_launcher, prepare_gpu_environment
from primus_odc.megatron.train_config import normalise
from primus_odc.versions import require_standalone

if TYPE_CHECKING:
    import torch

    from primus_odc._problems import Problems
    from primus_odc.config import ParsedComm
    from primus_odc.megatron.run_options import RunOptions
    from primus_odc.megatron.train_config import TrainConfig

EXIT_FAILURE = 1
QUIET_S = 15.0
"""How long a process leaves it to the first one of its host to tell an error that both have."""
_EVERYBODYS = (ConfigError, DataError, VersionError)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``primus-odc train``."""
    parser.add_argument("config", help="an experiment YAML, for example configs/cpu_odc_nopad.yaml")
    parser.add_argument("--check", action="store_true", help="check everything that can be known before a run, and do not train")
    take_overrides(parser)


def run_train(args: argparse.Namespace) -> int:
    """Train ``args.config`` with the overrides ``args.overrides`` as one of the processes the launcher started.

    Returns:
        0 after ``--check``. A training run ends the process here, with code 0, 1 (anything unforeseen), 2 (:class:`OdcError`) or 130
        (interrupted).

    Raises:
        ConfigError: what is wrong before any process group exists.
        VersionError: torch or megatron-core outside the tested range.
    """
    end_with_launcher()
    try:
        options = prepare(args.config, args.overrides, thorough=args.check)
    except OdcError:
        _leave_it_to_the_first()
        raise
    if not args.check:
        _train(options, args.traceback)
    elif os.environ.get("RANK", "0") == "0":
        on_hub = is_hub_name(options.params["sft_dataset_name"])
        samples = "the data are not looked up on the hub" if on_hub else "there are samples enough for a step"
        print(
            f"{args.config}: nothing wrong for {options.comm.arm} in keys and values, the files and packages that they name, the model, "
            f"devices and outputs ({options.experiment.root}); {samples}, whether all can be used is "
            "known when training starts; primus-odc doctor checks the machine"
        )
    return 0


def prepare(config: str, overrides: Sequence[str], *, thorough: bool = False) -> RunOptions:
    """Everything before the process group: all that is wrong is told at once.

    Args:
        config: the experiment YAML.
        overrides: words that change its keys.
        thorough: find out as well what the ranks of a run find when they read data and build the model: whether the data are enough for a
            step, and the model is that of the checkpoint.

    Raises:
        ConfigError: the experiment, its outputs, or the files and packages that it names.
        VersionError: torch or megatron-core outside the tested range.
    """
    experiment = load_experiment(config, overrides)
    # As Primus does: a file's env block comes before torch is imported.
    os.environ.update(experiment.env)
    # As torchrun has it where it starts several processes, or times of one process would differ for another reason than its number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _set_up_logging(int(os.environ.get("RANK", "0")))
    require_standalone()
    from primus_odc.megatron.outputs import find_output_problems
    from primus_odc.megatron.run_options import RunOptions

    params = normalise(experiment.params)
    if params.get("distributed_backend", "nccl") == "nccl":
        prepare_gpu_environment()

    def further(problems: Problems, comm: ParsedComm | None, train: TrainConfig | None) -> None:
        if train is None:
            return
        find_output_problems(problems, experiment, params, comm, train, thorough=thorough)
        if thorough:
            problems.of(lambda: require_samples(params, train.global_batch_size, evaluates=train.evaluates))

    return RunOptions.of(experiment, params, further)


def _train(options: RunOptions, show_traceback: bool) -> None:
    """Train and end the process."""
    from primus_odc.megatron.trainer import train

    backend = options.train.distributed_backend
    code = EXIT_FAILURE
    try:
        device = _device(backend)
        _initialise(backend, timedelta(minutes=options.train.distributed_timeout_minutes))
        train(options, device)
        _leave_together()
        code = 0
    except OdcError as error:
        everybodys = isinstance(error, _EVERYBODYS)
        if everybodys:
            _leave_it_to_the_first()
        if show_traceback:
            traceback.print_exc()
        tell(error, "" if everybodys else on_this_rank())
        code = EXIT_ERROR
    except KeyboardInterrupt:
        if show_traceback:
            traceback.print_exc()
        tell_interrupted()
        code = EXIT_INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - it ends the process right here
        traceback.print_exc()
        leave_unforeseen(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_it_to_the_first() -> None:
    """Called before an error is told that all processes have: all but the first of the host give the launcher time to end them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(QUIET_S)


def _device(backend: str) -> torch.device:
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _initialise(backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _leave_together() -> None:
    import torch.distributed as dist

    dist.barrier()


def _set_up_logging(rank: int) -> None:
    """Rank 0 tells on stdout how the run goes; what deserves attention comes from every rank, on stderr."""
    calm = logging.StreamHandler(sys.stdout)
    calm.addFilter(lambda record: record.levelno < logging.WARNING)
    calm.setFormatter(logging.Formatter("%(message)s"))
    alarming = logging.StreamHandler(sys.stderr)
    alarming.setLevel(logging.WARNING)
    alarming.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[calm, alarming])
    logging.getLogger("primus_odc").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank != 0:
        # Every rank reads the same data and would say the same about it.
        logging.getLogger("primus_odc.data").setLevel(logging.ERROR)
