"""What traffic over the links costs the compute beside it: `torchrun --nproc-per-node 2 scripts/bench_links.py FILE`.

Matrix products run back to back, eight in a row of 13 ms; in every row, or every so many, a copy starts in another stream: from this
device's memory, or from the other GPU's, large or tiny. Prints and writes the time of one product (mean over the second half of each run),
and the clock and power that NVML tells where `pynvml` is installed. A device at its power limit slows its clock for whatever else takes
power, so a copy of 64 KiB tells what it costs that links are awake at all, and rarer copies how long they stay so.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

KIB = 1 << 10
SIZE = 8192
PRODUCTS = 8
WARM_UP_S, RUN_S, ROUNDS = 3.0, 1.3, 2
LARGE, TINY = 60 << 20, 64 * KIB
CASES: tuple[tuple[str, int, int], ...] = (
    ("none", 0, 1),
    ("here", LARGE, 1),
    ("peer", LARGE, 1),
    ("none", 0, 1),
    ("here", TINY, 1),
    *(("peer", TINY, rows) for rows in (1, 2, 4, 8, 32)),
)
"""(from where, bytes of a copy, rows of products from one to the next)"""


def sensors(index: int) -> Any:
    """A function that tells (clock in MHz, power in W) of a device; None without `pynvml`."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return lambda: (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM), pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)


def measure(copies: tuple[torch.Tensor, torch.Tensor] | None, every: int, seconds: float, ask: Any) -> dict[str, float]:
    """Run rows of products for ``seconds``, with a copy of the second tensor into the first beside one of ``every`` rows."""
    factor = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    product, side = torch.empty_like(factor), torch.cuda.Stream()
    times: list[float] = []
    states: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for number in range(PRODUCTS):
            if copies is not None and len(times) % every == 0 and number == PRODUCTS // 2:
                with torch.cuda.stream(side):
                    copies[0].copy_(copies[1])
            torch.mm(factor, factor, out=product)
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / PRODUCTS)
        if ask is not None and len(times) % 8 == 0:
            states.append(ask())
    half = states[len(states) // 2 :]
    found = {"product_us": statistics.mean(times[len(times) // 2 :])}
    return found | {key: statistics.mean(s[i] for s in half) for i, key in enumerate(("clock_mhz", "power_w")) if half}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert group is not None
    arena = symm_mem.empty(LARGE, dtype=torch.uint8, device=torch.device("cuda", rank))
    peer = symm_mem.rendezvous(arena, group).get_buffer(1 - rank, (LARGE,), torch.uint8, 0)
    target, here = (torch.empty(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2))
    if rank == 0:
        ask = sensors(rank)
        measure(None, 1, WARM_UP_S, ask)
        rows = []
        for where, nbytes, every in CASES * ROUNDS:
            copies = None if where == "none" else (target[:nbytes], {"here": here, "peer": peer}[where][:nbytes])
            row = {"copy_from": where, "nbytes": nbytes, "every_rows": every, **measure(copies, every, RUN_S, ask)}
            rows.append(row)
            print(", ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
        Path(sys.argv[1]).write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1), encoding="utf-8")
    dist.barrier(group=gloo)  # the other GPU's memory is read until here, and it computes nothing meanwhile
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
