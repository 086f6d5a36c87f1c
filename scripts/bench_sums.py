"""The settle's sum over peers by form and number of programs, against NCCL: `torchrun --nproc-per-node 2 scripts/bench_sums.py FILE`.

What :mod:`primus_odc.primitives.forms` chooses was chosen by this table. Sources are slices of this rank's and of the other's memory in
turn; with four or more each slice is a part of the same arena, so half of the sources lie behind the links. Microseconds are the median of
two calls in a row behind two matrix products, with both ranks starting together; the slowdown of a row of twelve matrix products by sums
beside them is noisy below 5 %.
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
import torch.distributed._symmetric_memory as symm_mem

from primus_odc.primitives import forms, kernels

NUMEL = 64 << 20  # fp32 numbers of a shard: 256 MiB
PROGRAMS = (12, 16, 24, 32, 64)
FORMS = (None, (4096, 8, 1), (4096, 8, 2), (4096, 8, 3), (8192, 16, 1), (8192, 16, 2), (8192, 16, 3))
"""(block, warps, stages); None: what the engine takes. Left out where its blocks do not fit into shared memory."""
REPEATS, WARM_UP = 6, 2


class TooLargeError(Exception):
    """A form whose blocks under way have no room."""


def fixed(block: int, warps: int, stages: int) -> Callable[[int, int, int], tuple[int, int, int]]:
    """In place of :func:`primus_odc.primitives.forms.form`."""

    def form(sources: int, nbytes: int, room: int) -> tuple[int, int, int]:
        if (stages - 1) * sources * block * nbytes > room:
            raise TooLargeError
        return block, warps, stages

    return form


def timed(call: Callable[[], object], factor: torch.Tensor) -> float:
    """Microseconds of one call."""
    times = []
    for number in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        for _ in range(2):
            torch.mm(factor, factor)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        call()
        stop.record()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            times.append(1e3 * start.elapsed_time(stop) / 2)
    return statistics.median(times)


def products(beside: Callable[[], object] | None, calls: int, factor: torch.Tensor, side: torch.cuda.Stream) -> float:
    """Milliseconds of a row of products with ``calls`` of ``beside`` in another stream."""
    times = []
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(12):
            torch.mm(factor, factor)
        stop.record()
        with torch.cuda.stream(side):
            for _ in range(calls if beside is not None else 0):
                assert beside is not None
                beside()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[1:])


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    arena = symm_mem.empty(NUMEL * world, dtype=torch.float32, device=device)
    group = dist.group.WORLD
    assert group is not None
    handle = symm_mem.rendezvous(arena, group)
    arena.uniform_(-1, 1)
    slices = [handle.get_buffer(r, (NUMEL,), torch.float32, rank * NUMEL) for r in range(world)]
    total, reduced = (torch.empty(NUMEL, device=device) for _ in range(2))
    whole = torch.empty(NUMEL * world, device=device)
    factor = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)
    rows = []
    for sources, numel in ((2, NUMEL), (2, NUMEL // 8), (4, NUMEL // 8), (8, NUMEL // 8)):
        collective = timed(lambda n=numel: dist.reduce_scatter_tensor(reduced[:n], whole[: n * world]), factor)  # type: ignore[misc]
        alone = products(None, 0, factor, side)
        every = [s[i * numel : (i + 1) * numel] for i in range(sources // world) for s in slices]
        kernel = kernels.PullSum(every)
        for kind, dtypes in (("wide", (None, None)), ("narrow", (torch.bfloat16, torch.bfloat16)), ("mixed", (None, torch.bfloat16))):
            present = {number: dtypes[number % 2] for number in range(sources)}
            for form in FORMS:
                kernels.form = forms.form if form is None else fixed(*form)  # type: ignore[assignment]
                for programs in PROGRAMS:
                    kernels.PROGRAMS = programs
                    call = lambda k=kernel, p=present, n=numel: k(total[:n], p)  # noqa: E731
                    try:
                        us = timed(call, factor)
                    except TooLargeError:  # on every rank alike
                        break
                    row = {"sources": sources, "numel": numel, "kind": kind, "form": form, "programs": programs, "us": us}
                    if form is None:
                        row |= {"collective_us": collective, "slows_products": products(call, 8, factor, side) / alone - 1}
                    rows.append(row)
                    if rank == 0:
                        print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    dist.barrier()
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
