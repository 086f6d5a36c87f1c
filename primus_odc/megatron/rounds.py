"""Arms in turn on the same minibatches: what a comparison measures.

A round is one minibatch, run by every arm and by ``ideal``, one after the other. The order rotates from round to round, so that no arm
always runs after the same other one and a disturbance of the machine meets them all alike. Before each all ranks meet in a barrier; its
step lasts from the first rank's start to the last rank's end, on the host's one clock. Plans and packed microbatches are ready before.

Timed rounds leave stock arms alone: nothing of ours runs inside FSDP2. What a rank computed in them is what its thread used of the
processor, of which a wait in a collective takes nothing. Afterwards one minibatch is run once more by every arm, with its transfers on
record, for the timeline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from primus_odc.data.dataset import TokenDataset
from primus_odc.megatron.arm import Arm, StepOutcome
from primus_odc.megatron.device_rounds import device_step, seen_on_device
from primus_odc.megatron.ideal import IDEAL, Ideal
from primus_odc.megatron.minibatch import Minibatch, make_minibatch
from primus_odc.megatron.round_records import ArmStep, IdealStep, RankStep, Round, lengths_of
from primus_odc.planning import CostModel, Policy
from primus_odc.report.timeline import Span, SpanKind, SpanRecorder, Timeline, compute_table, exclusive_spans, make_timeline

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class MinibatchMaker:
    """Makes one minibatch for every way of planning it."""

    dataset: TokenDataset
    cost_model: CostModel
    max_tokens: int
    device: torch.device

    def __call__(self, step: int, indices: npt.NDArray[np.int64], plans: set[tuple[Policy, bool]]) -> dict[tuple[Policy, bool], Minibatch]:
        """(policy, pad_empty_ranks) -> the minibatch of these samples of the dataset."""
        samples = [self.dataset[int(i)] for i in indices]
        return {
            (policy, pad): make_minibatch(
                step,
                samples,
                policy=policy,
                cost_model=self.cost_model,
                max_tokens=self.max_tokens,
                world_size=dist.get_world_size(),
                rank=dist.get_rank(),
                device=self.device,
                pad_empty_ranks=pad,
            )
            for policy, pad in plans
        }


class Rounds:
    """The arms of a comparison, and their rounds; all ranks make the same calls."""

    def __init__(self, arms: Sequence[Arm], ideal: Ideal, make: MinibatchMaker, collect: Callable[[], object]) -> None:
        """``collect`` is called between two steps: to collect garbage, which would else be charged to whichever arm it meets."""
        self._arms: dict[str, Arm] = {arm.name: arm for arm in arms}
        self._ideal = ideal
        self._make = make
        self._plans = {(arm.policy, arm.pad_empty_ranks) for arm in arms} | {(ideal.policy, False)}
        self._collect = collect

    def run(self, step: int, indices: npt.NDArray[np.int64]) -> Round:
        """Train every arm on these samples of the dataset."""
        minibatches = self._make(step, indices, self._plans)
        self._ideal.follow()
        names = [*self._arms, IDEAL]
        start = step % len(names)
        steps: dict[str, ArmStep] = {}
        ideal = None
        for name in names[start:] + names[:start]:
            self._collect()
            if name != IDEAL:
                arm = self._arms[name]
                steps[name] = _timed_step(arm, minibatches[arm.policy, arm.pad_empty_ranks])
            elif minibatches[self._ideal.policy, False].target_tokens:
                ideal = self._timed_ideal(minibatches[self._ideal.policy, False])
        return Round(arms={name: steps[name] for name in self._arms}, ideal=ideal)

    def timelines(self, step: int, indices: npt.NDArray[np.int64]) -> list[Timeline]:
        """Train every arm on these samples once more, with all transfers on record; ``step`` is the number to show."""
        minibatches = self._make(step, indices, self._plans)
        timelines = []
        for name, arm in self._arms.items():
            self._collect()
            minibatch = minibatches[arm.policy, arm.pad_empty_ranks]
            spans = [span for rank in _all_ranks(_recorded_step(arm, minibatch)) for span in rank]
            timelines.append(make_timeline(name, step, spans, dist.get_world_size()))
        return timelines

    def _timed_ideal(self, minibatch: Minibatch) -> IdealStep:
        dist.barrier()
        runs = _all_ranks(self._ideal.run(minibatch))
        return IdealStep(
            ms=max(run.compute_ms for run in runs) + max(run.optimizer_ms for run in runs),
            loss=math.fsum(run.loss_sum for run in runs) / minibatch.target_tokens,
            lengths=lengths_of(minibatch),
            microbatch_ms=[run.microbatch_ms for run in runs],
        )


class ProcessorRecorder(SpanRecorder):
    """Notes beside every span how much of the processor the thread had used when it ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.used_s = [time.thread_time()]

    def add(
        self, kind: SpanKind, start_s: float, end_s: float, microbatch: int | None = None, label: str = "", arrived_s: float | None = None
    ) -> None:
        super().add(kind, start_s, end_s, microbatch, label, arrived_s)
        self.used_s.append(time.thread_time())


def _recorded_step(arm: Arm, minibatch: Minibatch) -> list[Span]:
    """One step with all that can be known of its transfers."""
    if arm.on_gpu:
        return device_step(arm, minibatch)[3]
    recorder = SpanRecorder(arm.rank)
    arm.meter.time_collectives = True
    dist.barrier()
    arm.train_step(minibatch, recorder)
    arm.meter.time_collectives = False
    return recorder.take()


def _timed_step(arm: Arm, minibatch: Minibatch) -> ArmStep:
    arm.meter.time_collectives = False
    if arm.on_gpu:
        start, end, outcome, spans = device_step(arm, minibatch)
        return _over_ranks(minibatch, start, end, outcome, seen_on_device(spans, minibatch.counts[arm.rank]))
    exposed_s = arm.meter.exposed_cpu_s
    dist.barrier()
    recorder = ProcessorRecorder(arm.rank)
    start, used_s = time.perf_counter(), time.thread_time()
    outcome = arm.train_step(minibatch, recorder)
    end, used_s = time.perf_counter(), time.thread_time() - used_s
    busy_ms = 1e3 * (used_s - (arm.meter.exposed_cpu_s - exposed_s))
    samples = [len(bucket) for bucket in minibatch.plan.microbatches[arm.rank]] or [0] * len(minibatch.microbatches)
    seen = _on_demand(recorder, busy_ms, samples) if arm.engine is not None else _stock(recorder, busy_ms, samples)
    return _over_ranks(minibatch, start, end, outcome, seen)


def _over_ranks(minibatch: Minibatch, start: float, end: float, outcome: StepOutcome, seen: RankStep) -> ArmStep:
    starts, ends, ranks = zip(*_all_ranks((start, end, seen)), strict=True)
    return ArmStep(ms=1e3 * (max(ends) - min(starts)), outcome=outcome, ranks=list(ranks), lengths=lengths_of(minibatch))


def _on_demand(recorder: SpanRecorder, busy_ms: float, samples: Sequence[int]) -> RankStep:
    """``samples``: how many each microbatch holds."""
    rank = recorder.rank
    spans = exclusive_spans(recorder.take())
    table = compute_table(Timeline(arm="", step=0, world_size=rank + 1, spans=spans))[rank] or [0.0] * len(samples)
    return RankStep(
        busy_ms=busy_ms - _padding(table, samples),
        microbatch_ms=table,
        communication_ms=_total(spans, "communication", "settle", "publish"),
        wait_ms=_total(spans, "wait"),
        optimizer_ms=_total(spans, "optimizer"),
    )


def _stock(recorder: ProcessorRecorder, busy_ms: float, samples: Sequence[int]) -> RankStep:
    """``samples``: how many each microbatch holds."""
    used_s = recorder.used_s
    spans = recorder.take()
    microbatch_ms = [0.0] * len(samples)
    for span, (before, after) in zip(spans, pairwise(used_s), strict=True):
        if span.microbatch is not None:
            microbatch_ms[span.microbatch] += 1e3 * (after - before)
    return RankStep(
        busy_ms=busy_ms - _padding(microbatch_ms, samples),
        microbatch_ms=microbatch_ms,
        communication_ms=max(0.0, _total(spans, "forward", "backward", "communication") - sum(microbatch_ms)),
        wait_ms=None,
        optimizer_ms=_total(spans, "optimizer"),
    )


def _padding(microbatch_ms: Sequence[float], samples: Sequence[int]) -> float:
    return sum(ms for ms, held in zip(microbatch_ms, samples, strict=True) if held == 0)


def _total(spans: Sequence[Span], *kinds: SpanKind) -> float:
    return sum(span.duration_ms for span in spans if span.kind in kinds)


def _all_ranks(value: T) -> list[T]:
    """``value`` of every rank, in rank order."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
