"""One rank of a benchmark, started by :mod:`primus_odc.bench.command` as ``python -m primus_odc.bench.worker RANK JOB``."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from primus_odc.bench.job import Job
from primus_odc.errors import ConfigError
from primus_odc.megatron.local_ranks import end_with_parent, prepare_gpu_environment, run_and_exit
from primus_odc.versions import require_standalone


def main(arguments: list[str]) -> None:
    """Run one rank and end the process."""
    started = time.monotonic()
    end_with_parent()
    rank, job = int(arguments[0]), Job.read(Path(arguments[1]))
    prepare_gpu_environment()
    if job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logging.basicConfig(stream=sys.stdout if rank == 0 else sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("primus_odc").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    run_and_exit(lambda: _run(rank, job, started))


def _run(rank: int, job: Job, started: float) -> None:
    require_standalone()
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if job.device == "cuda":
        if not torch.cuda.is_available() or torch.cuda.device_count() < job.world_size:
            raise ConfigError([f"--device cuda: {job.world_size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}"])
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
        # No device_id: it would open a communicator at once for each of the many groups megatron-core makes.
    )
    if job.kind == "train":
        from primus_odc.bench.train import bench_train

        bench_train(job, device, started)
    else:
        from primus_odc.bench.primitives import bench_primitives

        bench_primitives(job, device)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
