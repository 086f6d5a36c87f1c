"""``primus-odc train CONFIG``: one process of a training run, under torchrun or alone.

Every process ends in ``os._exit``: after collectives over gloo, a process that leaves through the interpreter's finalisation aborts now
and then although all its work is done. A process that fails says why on stderr and ends with a code other than 0; on demand the others
notice by themselves, under collectives the launcher ends them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from primus_odc._experiment_yaml import read_yaml
from primus_odc.cli import EXIT_ERROR
from primus_odc.errors import ConfigError, OdcError, VersionError
from primus_odc.experiment import Experiment, load_experiment
from primus_odc.megatron.train_config import check_keys, normalise
from primus_odc.versions import require_megatron, require_torch

if TYPE_CHECKING:
    import torch

EXIT_FAILURE = 1


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``primus-odc train``."""
    parser.add_argument("config", help="an experiment YAML, for example configs/cpu_odc_nopad.yaml")


def run_train(args: argparse.Namespace) -> NoReturn:
    """Train ``args.config`` with the overrides ``args.overrides`` as one of the processes the launcher started.

    Raises:
        ConfigError: what is wrong before any process group exists; everything later ends the process here.
        VersionError: torch or megatron-core outside the tested range.
    """
    experiment = load_experiment(args.config, args.overrides)
    # As Primus does: a file's env block comes before torch is imported.
    os.environ.update(experiment.env)
    rank = int(os.environ.get("RANK", "0"))
    _set_up_logging(rank)
    params = normalise(experiment.params)
    if is_self_contained(experiment):
        check_keys(params)
    require_torch()
    require_megatron()
    from primus_odc.megatron.trainer import RunOptions, train

    options = RunOptions.of(experiment, params)
    device = _device(options.train.distributed_backend)
    code = EXIT_FAILURE
    try:
        _initialise(options.train.distributed_backend, timedelta(minutes=options.train.distributed_timeout_minutes))
        train(options, device)
        _leave_together()
        code = 0
    except (ConfigError, VersionError) as error:
        print(f"primus-odc: error: {error}", file=sys.stderr)
        code = EXIT_ERROR
    except OdcError:
        traceback.print_exc()
        code = EXIT_ERROR
    except BaseException:  # noqa: BLE001 - it ends the process right here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_self_contained(experiment: Experiment) -> bool:
    """Whether the module names no preset of Primus, so that every key in it is meant for this trainer."""
    module = read_yaml(experiment.source)["modules"][experiment.module_name]
    return "config" not in module and "model" not in module


def _device(backend: str) -> torch.device:
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(["distributed_backend: nccl needs a GPU and torch sees none; set distributed_backend: gloo to train on the CPU"])
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
    warnings.filterwarnings("ignore", module=r"megatron\.")
