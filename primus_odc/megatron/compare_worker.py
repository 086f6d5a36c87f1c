"""One rank of a comparison, started by :mod:`primus_odc.megatron.compare` as ``python -m primus_odc.megatron.compare_worker RANK JOB``.

torch and megatron-core are imported here and nowhere before, after their versions are found to be tested ones.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

from primus_odc.config import parse_odc
from primus_odc.experiment import load_experiment
from primus_odc.megatron.compare_job import Job, arm_params
from primus_odc.megatron.local_ranks import end_with_parent, prepare_gpu_environment, run_and_exit
from primus_odc.versions import require_standalone


def main(arguments: list[str]) -> None:
    """Run one rank and end the process."""
    end_with_parent()
    rank, job = int(arguments[0]), Job.read(Path(arguments[1]))
    logging.basicConfig(stream=sys.stdout if rank == 0 else sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s")
    if job.on_gpus:
        prepare_gpu_environment()
    run_and_exit(lambda: _run(rank, job))


def _run(rank: int, job: Job) -> None:
    require_standalone()
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if job.on_gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    timeout_s = parse_odc(arm_params(load_experiment(Path(job.config), job.overrides).params, job.arms[0])).odc.timeout_s
    dist.init_process_group(
        "nccl" if job.on_gpus else "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    module, _, function = job.entry.partition(":")
    getattr(importlib.import_module(module), function)(job, device)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
