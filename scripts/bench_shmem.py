"""Gather and sum of the native kernels against NCCL, on GPUs of one host: `torchrun --nproc-per-node 2 scripts/bench_shmem.py FILE`.

Writes a JSON file and prints a table. *Gather*: every rank's shard into one buffer, against all_gather_into_tensor. *Sum*: the fp32 shard
of the sum over ranks, against reduce_scatter_tensor. Rates count the bytes that come from peers. Median of 20 calls, timed by CUDA events
of each rank with all ranks starting together; the kernels and NCCL take turns, so that both meet the same state of the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from primus_odc.symmetric.shmem.memory import ShmemMemory
from primus_odc.symmetric.shmem.plan import Read

MIB = 1 << 20
SIZES = (16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
"""Bytes of the gathered buffer, and of each rank's addend."""
ROUNDS = 20
WARM_UP = 5


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, world, rank == 0)
    names = [f"rank {r}" for r in range(world)]
    memory = ShmemMemory("mori" if torch.version.hip else "nvshmem", max(SIZES), rank, names, [0] * world, store, device, timeout_s=120)
    memory.arena.view(torch.float32).uniform_(-1, 1)
    rows = []
    for nbytes in SIZES:
        shard = nbytes // world
        gathered = torch.empty(nbytes, dtype=torch.uint8, device=device)
        expected = torch.empty_like(gathered)
        reads = [Read(pe, 0, gathered.data_ptr() + pe * shard, shard) for pe in range(world)]
        mine = slice(rank * shard, (rank + 1) * shard)
        peers = [memory.peer(pe) for pe in range(world)]
        views = [peer[mine].view(torch.float32) for peer in peers if peer is not None]
        total, reduced = (torch.empty(shard // 4, dtype=torch.float32, device=device) for _ in range(2))
        own = memory.arena[:shard].clone()  # as the arena's twin in ordinary memory, where a collective would find it
        addend = memory.arena[:nbytes].view(torch.float32).clone()
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "gather": (
                lambda reads=reads: memory.get(reads),  # type: ignore[misc]
                lambda e=expected, o=own: dist.all_gather_into_tensor(e, o),  # type: ignore[misc]
            ),
            "sum": (
                lambda t=total, v=views: memory.reduce(t, v),  # type: ignore[misc]
                lambda r=reduced, a=addend: dist.reduce_scatter_tensor(r, a),  # type: ignore[misc]
            ),
        }
        for name, (kernel, collective) in pairs.items():
            ours, theirs = time_pair(kernel, collective)
            rate = shard * (world - 1) / 1e9
            rows.append({"operation": name, "nbytes": nbytes, "kernel_ms": ours, "nccl_ms": theirs, "of_nccl": theirs / ours})
            if rank == 0:
                print(
                    f"{name:7} {nbytes / MIB:5.0f} MiB  kernel {ours:.3f} ms {rate / ours * 1e3:5.0f} GB/s   NCCL {theirs:.3f} ms "
                    f"{rate / theirs * 1e3:5.0f} GB/s   {theirs / ours:.2f} of NCCL",
                    flush=True,
                )
        if not torch.equal(gathered, expected) or not torch.allclose(total, reduced):
            raise SystemExit(f"rank {rank}: {nbytes} bytes: kernels and NCCL differ")
    memory.close()
    if rank == 0:
        result = {"gpu": torch.cuda.get_device_name(device), "ranks": world, "torch": torch.__version__, "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def time_pair(kernel: Callable[[], object], collective: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(WARM_UP + ROUNDS):
        for call, kept in zip((kernel, collective), times, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(200_000)  # the launch is not timed
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                kept.append(start.elapsed_time(end))
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
