"""One minibatch of every arm as it went: a trace to open in Perfetto or chrome://tracing, and a picture of all ranks.

On a GPU both are made from torch's profiler, and the trace has every kernel and copy of every stream. The picture shows the stream that
computes: what it ran under which annotation, and where nothing ran on it although the step was not over. Such a gap counts as waiting,
labelled with what the other streams did meanwhile, and is left out where it is shorter than :data:`SMALLEST_GAP_US`, as the space between
two launches is. On a CPU both are made from the spans the trainer records.

All times are those of the host's one clock, so the ranks' rows fit together.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from primus_odc.bench.clock import Clock
from primus_odc.bench.data import BenchMinibatch
from primus_odc.bench.timeline_png import draw_timelines
from primus_odc.bench.visit import Runner, visit
from primus_odc.megatron.compare_rank import tell
from primus_odc.report.timeline import Span, SpanKind, SpanRecorder, Timeline, exclusive_spans, fill_idle, make_timeline

Event = dict[str, Any]
_PhaseAt = tuple[float, float, tuple[SpanKind, int | None]]  # start, stop, (kind, microbatch)
SMALLEST_GAP_US = 30.0
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_KEPT = (*_DEVICE, "gpu_user_annotation", "user_annotation")
_KINDS: tuple[SpanKind, ...] = ("forward", "backward", "settle", "publish", "optimizer")


def trace_point(
    folder: Path,
    name: str,
    runners: Sequence[Callable[[], Runner]],
    minibatches: dict[str, list[BenchMinibatch]],
    device: torch.device,
    collect: Callable[[], object],
) -> None:
    """Run the first minibatch of each arm once more with everything on record; rank 0 writes ``ARM.trace.json.gz`` and ``timeline.png``."""
    target = folder / name.replace(" ", "-").replace(",", "")
    timelines = []
    for make in runners:
        collect()
        runner = make()
        arm = runner.arm.name
        batch = minibatches[arm][:1]
        visit(runner, batch, Clock(device))  # what another arm did to caches is not what is to be seen
        events, spans = (_on_gpu if device.type == "cuda" else _on_cpu)(runner, batch, device)
        runner.leave()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (events, spans))
        if dist.get_rank() == 0:
            write_trace(target / f"{arm.replace(':', '-')}.trace.json.gz", [events for events, _ in ranks])
            every = [span for _, spans in ranks for span in spans]
            split = make_timeline(arm, 0, every, len(ranks)) if device.type == "cpu" else _timeline(arm, [spans for _, spans in ranks])
            timelines.append(split)
    if dist.get_rank() == 0:
        draw_timelines(target / "timeline.png", timelines)
    tell(f"{name}: traces and picture written: {target}")


def write_trace(file: Path, ranks: Sequence[Sequence[Event]]) -> None:
    """One Chrome trace of all ranks, gzipped as Perfetto reads it. Times start at the first event of any rank."""
    origin = min((event["ts"] for events in ranks for event in events), default=0.0)
    merged: list[Event] = []
    for rank, events in enumerate(ranks):
        merged.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        merged.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        merged += [{**event, "pid": rank, "ts": event["ts"] - origin} for event in events]
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as out:
        json.dump({"traceEvents": merged, "displayTimeUnit": "ms"}, out)


def _on_cpu(runner: Runner, batch: Sequence[BenchMinibatch], device: torch.device) -> tuple[list[Event], list[Span]]:
    recorder = SpanRecorder(dist.get_rank())
    with _recording(runner, recorder):
        visit(runner, batch, Clock(device))
    spans = recorder.take()
    events = [
        {
            "ph": "X",
            "cat": span.kind,
            "name": span.kind + ("" if span.microbatch is None else f" {span.microbatch}") + (f" ({span.label})" if span.label else ""),
            "ts": 1e3 * span.start_ms,
            "dur": 1e3 * span.duration_ms,
            "tid": 0,
        }
        for span in spans
    ]
    return events, spans


@contextmanager
def _recording(runner: Runner, recorder: SpanRecorder) -> Iterator[None]:
    runner.meter.recorder = recorder
    try:
        yield
    finally:
        runner.meter.recorder = None


def _on_gpu(runner: Runner, batch: Sequence[BenchMinibatch], device: torch.device) -> tuple[list[Event], list[Span]]:
    from tempfile import TemporaryDirectory

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        visit(runner, batch, Clock(device))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8"))
    events = kept_events(trace)
    return events, device_spans(events, dist.get_rank())


def kept_events(trace: dict[str, Any]) -> list[Event]:
    """The device's activities and the annotations of a profiler's trace, in microseconds of the host's clock; one row a stream."""
    base_us = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    kept = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _KEPT:
            on_device = event["cat"] != "user_annotation"
            row = f"stream {event.get('args', {}).get('stream', event['tid'])}" if on_device else "host annotations"
            moved = {key: value for key, value in event.get("args", {}).items() if key in ("bytes", "stream", "memory bandwidth (GB/s)")}
            kept.append(
                {
                    "ph": "X",
                    "cat": event["cat"],
                    "name": event["name"],
                    "ts": base_us + float(event["ts"]),
                    "dur": float(event["dur"]),
                    "tid": row,
                    "args": moved,
                }
            )
    return kept


def device_spans(events: Sequence[Event], rank: int) -> list[Span]:
    """The computing stream of one rank as exclusive spans: what ran, and waiting where nothing did."""
    device = sorted((event for event in events if event["cat"] in _DEVICE), key=lambda event: float(event["ts"]))
    busy_us: dict[str, float] = {}
    for event in device:
        if event["cat"] == "kernel" and "nccl" not in event["name"].lower():
            busy_us[event["tid"]] = busy_us.get(event["tid"], 0.0) + event["dur"]
    if not busy_us:
        return []
    main = max(busy_us, key=lambda stream: busy_us[stream])
    phases: list[_PhaseAt] = []
    step_start, step_stop = float("-inf"), float("inf")  # around it the ranks meet, which is no part of it
    for event in events:
        if event["cat"] == "gpu_user_annotation" and event["tid"] == main:
            start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            if event["name"] == "step":
                step_start, step_stop = start, stop
            elif (named := _annotation(event["name"])) is not None:
                phases.append((start, stop, named))
    phases.sort(key=lambda phase: phase[0])
    others = [event for event in device if event["tid"] != main]
    spans: list[Span] = []
    end = None
    for event in (event for event in device if event["tid"] == main and step_start <= event["ts"] < step_stop):
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        kind, microbatch = _phase(phases, start)
        if end is not None and start - end > SMALLEST_GAP_US:
            spans.append(_span(rank, "wait", end, start, microbatch, _running(others, end, start)))
        elif end is not None and spans and spans[-1].kind == kind and spans[-1].microbatch == microbatch:
            last = spans.pop()
            start = 1e3 * last.start_ms
        elif end is not None:
            start = min(start, end)
        end = max(stop, end or stop)
        spans.append(_span(rank, kind, start, end, microbatch, ""))
    return spans


def _annotation(name: str) -> tuple[SpanKind, int | None] | None:
    word, _, number = name.partition(" ")
    kind = next((kind for kind in _KINDS if kind == word), None)
    return None if kind is None else (kind, int(number) if number.isdecimal() else None)


def _phase(phases: Sequence[_PhaseAt], at: float) -> tuple[SpanKind, int | None]:
    """What a moment belongs to: the last annotation started before, and backward where that was a forward and has ended.

    The profiler sees annotations on the device only for what was launched by the thread that made them, and backward is launched by
    autograd's own. Communication before the first.
    """
    found: tuple[SpanKind, int | None] = ("communication", None)
    for start, stop, (kind, microbatch) in phases:
        if start > at:
            break
        found = ("backward" if kind == "forward" and at > stop else kind, microbatch)
    return found


def _running(events: Sequence[Event], start: float, stop: float) -> str:
    """What filled most of a gap on the other streams."""
    shares: dict[str, float] = {}
    for event in events:
        overlap = min(stop, event["ts"] + event["dur"]) - max(start, event["ts"])
        if overlap > 0:
            shares[event["name"]] = shares.get(event["name"], 0.0) + overlap
    return max(shares, key=lambda name: shares[name]) if shares else ""


def _span(rank: int, kind: SpanKind, start_us: float, stop_us: float, microbatch: int | None, label: str) -> Span:
    return Span(rank=rank, kind=kind, start_ms=start_us / 1e3, end_ms=stop_us / 1e3, microbatch=microbatch, label=label)


def _timeline(arm: str, ranks: Sequence[Sequence[Span]]) -> Timeline:
    """Spans that are exclusive already on one axis; the waiting in them stays as it is."""
    origin = min((span.start_ms for spans in ranks for span in spans), default=0.0)
    end = max((span.end_ms for spans in ranks for span in spans), default=origin) - origin
    filled: list[Span] = []
    for rank, spans in enumerate(ranks):
        moved = [_span(rank, s.kind, 1e3 * (s.start_ms - origin), 1e3 * (s.end_ms - origin), s.microbatch, s.label) for s in spans]
        filled += fill_idle(exclusive_spans(moved), rank, end)
    return Timeline(arm=arm, step=0, world_size=len(ranks), spans=filled)
