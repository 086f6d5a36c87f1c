"""A visit: an arm runs a few minibatches back to back, and says of each when what was done.

No rank waits for another between the minibatches of a visit unless the arm itself makes it. Around a visit all ranks meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from primus_odc.bench.clock import Clock
from primus_odc.bench.data import BenchMinibatch
from primus_odc.bench.job import IDEAL, ArmSpec
from primus_odc.bench.stations import Stations, as_sharded, keep_unsharded
from primus_odc.megatron.meter import Meter
from primus_odc.report.timeline import SpanKind


@dataclass
class Marks:
    """Moments of one step, in this order."""

    microbatches: list[tuple[Any, Any]] = field(default_factory=list)
    """Start of forward and end of backward of each."""
    launched: list[tuple[float, Any, float]] = field(default_factory=list)
    """Of each: when the host had started its forward (``time.perf_counter``), the end of forward, when it had started its backward."""
    computed: Any = None
    """The last backward has ended."""
    settled: Any = None
    """Gradients are complete."""
    clipped: Any = None
    updated: Any = None
    """The optimizer is done."""
    end: Any = None
    """On demand the parameters are published too."""
    deliveries: list[tuple[Any, int]] | None = None
    """On demand, on a GPU: when each group's gradients were there, and the bytes of other ranks' in them."""
    grad_norm: torch.Tensor | None = None
    """Before clipping; None in ``ideal``, where every rank has its own gradients."""


@dataclass
class RankStep:
    """One step as one rank saw it; milliseconds, moments counted from the beginning of the visit."""

    ms: float
    """From the end of the step before, or from the beginning of the visit, to the end of this one."""
    computed_at: float
    settled_at: float
    clipped_at: float
    updated_at: float
    microbatch_ms: list[float]
    host_ahead_ms: list[tuple[float, float]]
    """Of each microbatch: from when the host had started all of its forward until the device was through with it, and of its backward. Near
    zero the device waits for the host. Zero on a CPU, which runs what it starts."""
    loss_sum: float
    grad_norm: float | None
    """Over all ranks, before clipping."""
    host_wait_ms: float | None = None
    """Host time inside the engine's waits for peers; None without an engine. A device may have had work meanwhile."""
    bytes_gathered: int | None = None
    bytes_reduced: int | None = None
    sums_kept: int | None = None
    """How often (``owner``) an owner had no free slot."""
    bytes_settled: int | None = None
    """Gradients of other ranks in this rank's sums: pulled, or (``owner``) pushed by them; None where it is not known."""
    bytes_hidden: int | None = None
    """Part of ``bytes_settled`` in the sums that were complete before this rank's last backward ended; None where it is not known."""


class Runner:
    """Runs the steps of one arm on this rank; made anew for each visit."""

    def __init__(self, arm: ArmSpec, stations: Stations, clock: Clock, clip_grad: float) -> None:
        self.arm = arm
        self._clock = clock
        self._clip_grad = clip_grad or float("inf")
        self._world_size = dist.get_world_size()
        self.replica = stations.replica() if arm.name == IDEAL else None
        self.station = None if arm.name == IDEAL else stations.station(arm)
        self.meter = self.station.meter if self.station is not None else Meter()
        if arm.name == "nccl_zero2" and self.station is not None:
            keep_unsharded(self.station.model)

    def leave(self) -> None:
        """Give the model back as it was."""
        if self.arm.name == "nccl_zero2" and self.station is not None:
            as_sharded(self.station.model)

    def step(self, minibatch: BenchMinibatch) -> tuple[Marks, torch.Tensor]:
        """One step; returns its marks and this rank's loss sum, both still on their way on a GPU."""
        if self.replica is not None:
            return self._ideal(minibatch)
        assert self.station is not None
        if self.station.engine is not None:
            return self._on_demand(minibatch)
        return self._stock(minibatch)

    def _ideal(self, minibatch: BenchMinibatch) -> tuple[Marks, torch.Tensor]:
        assert self.replica is not None
        replica = self.replica
        marks, total = self._microbatches(minibatch, replica.model, 1.0 / minibatch.target_tokens)
        marks.settled = marks.clipped = marks.computed
        with self._span("optimizer"):
            replica.update()
        marks.updated = marks.end = self._clock.mark()
        return marks, total

    def _on_demand(self, minibatch: BenchMinibatch) -> tuple[Marks, torch.Tensor]:
        assert self.station is not None and self.station.engine is not None
        model, engine, optimizer = self.station.model, self.station.engine, self.station.optimizer
        engine.begin_minibatch(len(minibatch.microbatches))
        deliveries = engine.time_settle() if self._clock.on_device else None
        marks, total = self._microbatches(minibatch, model, 1.0 / minibatch.target_tokens)
        marks.deliveries = deliveries
        with record_function("settle"):
            engine.settle()
        marks.settled = self._clock.mark()
        with self._span("optimizer"):
            marks.grad_norm = engine.clip_grad_norm_(self._clip_grad)
            marks.clipped = self._clock.mark()
            optimizer.step()
            optimizer.zero_grad()
        marks.updated = self._clock.mark()
        with record_function("publish"):
            engine.publish()
        marks.end = self._clock.mark()
        return marks, total

    def _stock(self, minibatch: BenchMinibatch) -> tuple[Marks, torch.Tensor]:
        assert self.station is not None
        model, optimizer = self.station.model, self.station.optimizer
        assert isinstance(model, FSDPModule)
        last = len(minibatch.microbatches) - 1

        def before(number: int) -> None:
            if self.arm.name == "nccl_zero2":
                model.set_requires_gradient_sync(number == last)
                model.set_reshard_after_backward(number == last)

        with self._collectives():
            # FSDP2 takes the mean over ranks.
            marks, total = self._microbatches(minibatch, model, self._world_size / minibatch.target_tokens, before)
        marks.settled = marks.computed
        with self._span("optimizer"):
            marks.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), self._clip_grad)
            marks.clipped = self._clock.mark()
            optimizer.step()
            optimizer.zero_grad()
        marks.updated = marks.end = self._clock.mark()
        return marks, total

    def _microbatches(
        self, minibatch: BenchMinibatch, model: nn.Module, scale: float, before: Callable[[int], None] = lambda number: None
    ) -> tuple[Marks, torch.Tensor]:
        """Forward and backward of all microbatches; ``before`` is called before each with its number."""
        marks = Marks()
        total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
        for number, microbatch in enumerate(minibatch.microbatches):
            before(number)
            start = self._clock.mark()
            with self._span("forward", number):
                loss = model(microbatch)
            started_forward, forward_end = time.perf_counter(), self._clock.mark()
            with self._span("backward", number):
                (loss * scale).backward()
            marks.launched.append((started_forward, forward_end, time.perf_counter()))
            total += loss.detach()
            marks.microbatches.append((start, self._clock.mark()))
        marks.computed = marks.microbatches[-1][1] if marks.microbatches else self._clock.mark()
        return marks, total

    def _span(self, kind: SpanKind, microbatch: int | None = None) -> AbstractContextManager[None]:
        """A span of the host's timeline while one is recorded; the device's has the same name in the profiler."""
        if self.meter.recorder is not None:
            return self.meter.span(kind, microbatch)
        return record_function(kind if microbatch is None else f"{kind} {microbatch}")

    def _collectives(self) -> AbstractContextManager[None]:
        return self.meter.collectives() if self.meter.recorder is not None else nullcontext()


def _number(norm: torch.Tensor | None) -> float | None:
    """The value of a norm; a collective where it is spread over the ranks."""
    if norm is None:
        return None
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _ahead(marks: Marks, clock: Clock, begin: Any, host_begin: float) -> list[tuple[float, float]]:
    if not clock.on_device:
        return [(0.0, 0.0) for _ in marks.launched]
    return [
        (clock.ms(begin, forward_end) - 1e3 * (forward - host_begin), clock.ms(begin, end) - 1e3 * (backward - host_begin))
        for (forward, forward_end, backward), (_, end) in zip(marks.launched, marks.microbatches, strict=True)
    ]


def visit(runner: Runner, minibatches: Sequence[BenchMinibatch], clock: Clock) -> list[list[RankStep]]:
    """[minibatch][rank] what every rank measured; all ranks call it, and get the same."""
    engine = runner.station.engine if runner.station is not None else None
    clock.synchronize()
    dist.barrier()
    clock.synchronize()
    begin, host_begin = clock.mark(), time.perf_counter()
    done = []
    before_ms = 0.0
    for minibatch in minibatches:
        with record_function("step"):
            marks, total = runner.step(minibatch)
        done.append((marks, total, engine.stats() if engine is not None else None))
    clock.synchronize()
    steps = []
    for marks, total, stats in done:
        end_ms = clock.ms(begin, marks.end)
        step = RankStep(
            ms=end_ms - before_ms,
            computed_at=clock.ms(begin, marks.computed),
            settled_at=clock.ms(begin, marks.settled),
            clipped_at=clock.ms(begin, marks.clipped),
            updated_at=clock.ms(begin, marks.updated),
            microbatch_ms=[clock.ms(start, end) for start, end in marks.microbatches],
            host_ahead_ms=_ahead(marks, clock, begin, host_begin),
            loss_sum=float(total),
            grad_norm=_number(marks.grad_norm),
        )
        if stats is not None:
            step.host_wait_ms = 1e3 * sum(stats["waited_s"].values())
            step.bytes_gathered, step.bytes_reduced = stats["bytes_gathered"], stats["bytes_reduced"]
            step.sums_kept = stats["sums_kept"]
            if marks.deliveries is not None:
                step.bytes_settled = sum(size for _, size in marks.deliveries)
                step.bytes_hidden = sum(size for event, size in marks.deliveries if clock.ms(begin, event) <= step.computed_at)
        before_ms = end_ms
        steps.append(step)
    ranks: list[list[RankStep]] = [steps] * dist.get_world_size()
    dist.all_gather_object(ranks, steps)
    return [list(same) for same in zip(*ranks, strict=True)]
