"""Timed steps on GPUs: what :mod:`primus_odc.megatron.rounds` does where the host only queues.

Milliseconds of phases are those of the computing stream, from events in it. What a rank waits for inside forward and backward, in
collectives or in gathers that were not hidden, cannot be told from computing there. So when all rounds are through, computing is predicted:
a fit of ``ideal``'s microbatches, which neither communicate nor wait, to the lengths of their samples. What is left of forward and backward
counts as communication, waiting included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from primus_odc.megatron.arm import Arm, StepOutcome
from primus_odc.megatron.meter import DeviceSpan
from primus_odc.megatron.minibatch import Minibatch
from primus_odc.megatron.round_records import ArmStep, RankStep, Round
from primus_odc.report.fit import fit_times, predict_ms
from primus_odc.report.timeline import Span


def device_step(arm: Arm, minibatch: Minibatch) -> tuple[float, float, StepOutcome, list[Span]]:
    """One step from a barrier on: its start and end on the host's clock, in seconds, with an idle device at both; and its spans."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    marks: list[DeviceSpan] = []
    arm.meter.device_spans = marks
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()
    start = time.perf_counter()
    try:
        outcome = arm.train_step(minibatch)
    finally:
        arm.meter.device_spans = None
    torch.cuda.synchronize()
    end = time.perf_counter()
    spans = [
        Span(
            rank=arm.rank,
            kind=kind,
            start_ms=1e3 * start + begin.elapsed_time(first),
            end_ms=1e3 * start + begin.elapsed_time(last),
            microbatch=microbatch,
        )
        for kind, microbatch, first, last in marks
    ]
    return start, end, outcome, spans


def seen_on_device(spans: Sequence[Span], microbatches: int) -> RankStep:
    """A step's phases as measured; computing holds the waiting inside it until :func:`predict_compute`."""
    microbatch_ms = [0.0] * microbatches
    for span in spans:
        if span.microbatch is not None:
            microbatch_ms[span.microbatch] += span.duration_ms
    optimizer_ms = sum(span.duration_ms for span in spans if span.kind == "optimizer")
    return RankStep(
        busy_ms=sum(microbatch_ms) + optimizer_ms,
        microbatch_ms=microbatch_ms,
        communication_ms=sum(span.duration_ms for span in spans if span.kind in ("settle", "publish")),
        wait_ms=None,
        optimizer_ms=optimizer_ms,
    )


def predict_compute(rounds: Sequence[Round]) -> list[Round]:
    """The rounds with computing predicted from ``ideal`` where it was measured together with waiting."""
    ideals = [step.ideal for step in rounds if step.ideal is not None]
    pairs = [
        (bucket, ms)
        for ideal in ideals
        for buckets, row in zip(ideal.lengths, ideal.microbatch_ms, strict=True)
        for bucket, ms in zip(buckets, row, strict=True)
    ]
    if not pairs:
        return list(rounds)
    coefficients, _ = fit_times(pairs)

    def predicted(step: ArmStep) -> ArmStep:
        ranks = []
        for buckets, seen in zip(step.lengths, step.ranks, strict=True):
            ms = [max(0.0, predict_ms(coefficients, bucket)) for bucket in buckets] if seen.microbatch_ms else []
            worked = sum(own for own, bucket in zip(ms, buckets, strict=False) if bucket)  # padding is no work
            rest = max(0.0, sum(seen.microbatch_ms) - sum(ms))
            ranks.append(
                replace(
                    seen,
                    busy_ms=min(step.ms, worked + seen.optimizer_ms),
                    microbatch_ms=ms,
                    communication_ms=seen.communication_ms + rest,
                )
            )
        return replace(step, ranks=ranks)

    return [Round(arms={name: predicted(arm) for name, arm in step.arms.items()}, ideal=step.ideal) for step in rounds]
