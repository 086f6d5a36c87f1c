from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from primus_odc.bench.trace import device_spans, kept_events, write_trace


def event(cat: str, name: str, ts: float, dur: float, stream: int) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 4, "tid": stream, "args": {"stream": stream, "bytes": 5}}


TRACE: dict[str, Any] = {
    "baseTimeNanoseconds": 5_000_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 4, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 9, "tid": 9},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "forward 0", "ts": 100, "dur": 300, "pid": 4, "tid": 7},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "FSDP::all_gather", "ts": 90, "dur": 500, "pid": 4, "tid": 7},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "optimizer", "ts": 900, "dur": 100, "pid": 4, "tid": 7},
        event("kernel", "gemm", 100, 100, 7),
        event("kernel", "ncclDevKernel_AllGather", 90, 220, 20),  # longer than anything, but no computing
        event("kernel", "gemm", 300, 100, 7),
        event("kernel", "gemm", 410, 190, 7),
        event("gpu_memcpy", "Memcpy DtoD", 600, 20, 7),
        event("kernel", "adamw", 900, 100, 7),
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 100, "dur": 900, "pid": 4, "tid": 7},
        event("gpu_memcpy", "of the barrier before", 20, 10, 7),
        event("gpu_memcpy", "of the exchange after", 1500, 10, 7),
    ],
}


def test_the_device_and_the_annotations_are_kept_on_the_hosts_clock() -> None:
    kept = kept_events(TRACE)
    assert len(kept) == 12 and {entry["tid"] for entry in kept} == {"stream 7", "stream 20"}
    assert min(entry["ts"] for entry in kept) == 5020.0


def test_gaps_of_the_computing_stream_are_waiting() -> None:
    spans = device_spans(kept_events(TRACE), 3)
    seen = [(span.kind, span.microbatch, round(1e3 * span.start_ms - 5000), round(1e3 * span.end_ms - 5000), span.label) for span in spans]
    assert seen == [
        ("forward", 0, 100, 200, ""),
        ("wait", 0, 200, 300, "ncclDevKernel_AllGather"),
        ("forward", 0, 300, 400, ""),
        ("backward", 0, 400, 620, ""),  # launched by autograd's thread, outside the annotation; the gap of 10 us is left out
        ("wait", None, 620, 900, ""),
        ("optimizer", None, 900, 1000, ""),
    ]
    assert {span.rank for span in spans} == {3}


def test_a_trace_holds_all_ranks_from_one_zero(tmp_path: Path) -> None:
    later = [{**entry, "ts": entry["ts"] + 50} for entry in kept_events(TRACE)]
    write_trace(tmp_path / "deep" / "arm.trace.json.gz", [later, kept_events(TRACE)])
    with gzip.open(tmp_path / "deep" / "arm.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    named = {entry["pid"]: entry["args"]["name"] for entry in events if entry["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    assert [min(entry["ts"] for entry in events if entry["ph"] == "X" and entry["pid"] == rank) for rank in (0, 1)] == [50.0, 0.0]
