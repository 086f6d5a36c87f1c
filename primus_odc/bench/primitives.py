"""One rank of ``primus-odc bench primitives``: the engine's two transfers against the collectives they stand for.

*gather*: an unsharded bf16 tensor from every rank's part, against all-gather. *scatter-accumulate*: every rank's fp32 gradients of the
whole tensor are added up at the owners, against reduce-scatter, from the moment FSDP2 hands over the gradients of one microbatch until
settle has put the sums in place.

What is timed are the engine's own calls with the very arguments FSDP2 gave it: a model of ``UNITS`` FSDP2 units of one parameter each runs
once, and its calls are repeated: all gathers in a row; all reductions and one settle, as at the end of a minibatch. Against them stands the
same number of collectives in a row. Each round times the engine and the collectives in turn. On a GPU both are queued behind a few matrix
products, as they are behind a model's compute, so that the host's time to start them counts where the device has to wait for it only.

Beside GEMMs: a row of matrix products in the current stream, the transfers in another one; what counts is how much longer the products
take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from primus_odc.bench.clock import Clock
from primus_odc.bench.job import Job
from primus_odc.bench.results import append, identity
from primus_odc.config import parse_options
from primus_odc.fsdp.engine import Engine
from primus_odc.fsdp.gather import Into
from primus_odc.fsdp.native import all_gather_single, reduce_scatter_single
from primus_odc.megatron.compare_rank import tell
from primus_odc.primitives.contribution import Contribution

COLUMNS = 1024
GEMM_SIZE = 8192
GEMMS = 12  # about 20 ms on an H200
GEMMS_AHEAD = 4
UNITS = 8
WARM_UP = 3


class CallRecorder(Engine):
    """An engine that keeps, by group, the arguments of the last gather and of the last reduction."""

    def __init__(self, *arguments: Any) -> None:
        self.gathered: dict[int, tuple[Into, torch.Tensor | None]] = {}
        self.reduced: dict[int, Contribution] = {}
        super().__init__(*arguments)

    def gather(self, group: int, into: Into, own: torch.Tensor | None) -> None:
        self.gathered[group] = into, own
        super().gather(group, into, own)

    def reduce(self, group: int, contribution: Contribution) -> None:
        self.reduced[group] = contribution
        super().reduce(group, contribution)

    def gather_again(self) -> None:
        """Every group's last gather once more, into the same memory."""
        for group, (into, own) in self.gathered.items():
            super().gather(group, into, own)

    def scatter_again(self) -> None:
        """Every group's last reduction once more, and settle; a minibatch has begun."""
        for group, contribution in self.reduced.items():
            super().reduce(group, contribution)
        self.settle()


class OneParameter(nn.Module):
    """A weight that is used in backward but costs nothing to speak of."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, COLUMNS, device="cpu"))

    def forward(self, nothing: torch.Tensor) -> torch.Tensor:
        """``nothing``: a zero; FSDP2 of torch 2.11 does not serve a root module without arguments on a GPU."""
        return self.weight.sum() + nothing


class Units(nn.Module):
    """``UNITS`` weights, each an FSDP2 unit of its own."""

    def __init__(self, rows: int, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.parts = nn.ModuleList(OneParameter(rows).to(mesh.device_type) for _ in range(UNITS))
        for part in self.parts:
            fully_shard(part, mesh=mesh, mp_policy=policy)

    def forward(self, nothing: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(nothing) for part in self.parts]).sum()


def bench_primitives(job: Job, device: torch.device) -> None:
    """Measure all sizes of ``job``."""
    clock = Clock(device)
    run = identity(job.commit) if dist.get_rank() == 0 else {}
    operations = []
    for nbytes in job.bytes:
        operations += _size(job, device, clock, nbytes)
        tell(f"{nbytes} bytes done")
    if dist.get_rank() == 0:
        keep = ("device", "world_size", "transport", "ranks_per_node", "repeats", "command")
        append(Path(job.out), run, {"kind": "primitives", **{key: getattr(job, key) for key in keep}, "operations": operations})


def _size(job: Job, device: torch.device, clock: Clock, nbytes: int) -> list[dict[str, Any]]:
    """Both operations at one size of the whole bf16 tensor; the gradients are twice as large."""
    world_size = job.world_size
    rows = max(1, nbytes // (2 * COLUMNS * world_size)) * world_size
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Units(rows, mesh, policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    options = {**job.engine_options(), "accumulate": "local", "parameters": "reshard"}
    engine = CallRecorder(model, parse_options(options))
    engine.begin_minibatch(1)
    model(torch.zeros((), device=device)).backward()
    engine.settle()
    engine.publish()
    whole = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device)
    part = torch.zeros(rows // world_size, COLUMNS, dtype=torch.bfloat16, device=device)
    whole_gradient, part_gradient = torch.zeros_like(whole, dtype=torch.float32), torch.zeros_like(part, dtype=torch.float32)
    gather: _Pair = (engine.gather_again, _times(UNITS, lambda: _wait(all_gather_single(whole, part))))
    scatter: _Pair = (engine.scatter_again, _times(UNITS, lambda: _wait(reduce_scatter_single(part_gradient, whole_gradient))))
    measured = [
        _operation("gather", whole.nbytes, gather, lambda: None, job, device, clock),
        _operation("scatter-accumulate", whole_gradient.nbytes, scatter, lambda: _begin(engine, model), job, device, clock),
    ]
    engine.detach()
    return measured


_Pair = tuple[Callable[[], None], Callable[[], None]]


def _begin(engine: CallRecorder, model: nn.Module) -> None:
    model.zero_grad()
    engine.begin_minibatch(None)
    engine.gather_again()  # as forward does: what it compares with what was published, settle need not


def _operation(
    name: str, nbytes: int, pair: _Pair, prepare: Callable[[], None], job: Job, device: torch.device, clock: Clock
) -> dict[str, Any]:
    """``pair``: the engine's transfers and the collectives, ``UNITS`` of each in one call; ``prepare`` comes before the engine's, outside
    the measured time."""
    own, collective = pair
    factor = _factor(device) if device.type == "cuda" else None
    times: dict[str, list[float]] = {"engine_us": [], "collective_us": []}
    for repeat in range(WARM_UP + job.repeats):
        for key, call, before in (("engine_us", own, prepare), ("collective_us", collective, lambda: None)):
            before()
            _meet(clock)
            if factor is not None:
                _multiply(factor, GEMMS_AHEAD)
            start = clock.mark()
            call()
            end = clock.mark()
            clock.synchronize()
            if repeat >= WARM_UP:
                times[key].append(1e3 * _slowest(clock.ms(start, end)) / UNITS)
    return {
        "operation": name,
        "nbytes": nbytes,
        "calls": UNITS,
        "bytes_moved": nbytes * (job.world_size - 1) / job.world_size,
        **times,
        "beside": _beside(pair, prepare, job, device, clock) if device.type == "cuda" else None,
    }


def _beside(pair: _Pair, prepare: Callable[[], None], job: Job, device: torch.device, clock: Clock) -> dict[str, list[float]]:
    """Milliseconds of a row of GEMMs, alone and with each transfer running beside them."""
    factor = _factor(device)
    side = torch.cuda.Stream(device)
    times: dict[str, list[float]] = {"alone_ms": [], "engine_ms": [], "collective_ms": []}
    for repeat in range(WARM_UP + job.repeats):
        for key, call, before in (
            ("alone_ms", None, lambda: None),
            ("engine_ms", pair[0], prepare),
            ("collective_ms", pair[1], lambda: None),
        ):
            before()
            _meet(clock)
            start = clock.mark()
            _multiply(factor, GEMMS)
            end = clock.mark()
            if call is not None:
                with torch.cuda.stream(side):
                    call()
            clock.synchronize()
            if repeat >= WARM_UP:
                times[key].append(_slowest(clock.ms(start, end)))
    return times


def _factor(device: torch.device) -> torch.Tensor:
    return torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16)


def _multiply(factor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor)


def _times(count: int, call: Callable[[], None]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def _meet(clock: Clock) -> None:
    clock.synchronize()
    dist.barrier()
    clock.synchronize()


def _slowest(value: float) -> float:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
