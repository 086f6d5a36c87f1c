"""Where the time of a rank's step goes: seconds without computing always, every span where a recorder is given.

An arm on collectives is stock FSDP2 and has no hook of ours in it. What it calls are two public functions of ``torch.distributed``, looked
up anew at each call: :meth:`Meter.collectives` replaces them by timed ones as long as a step runs. On a CPU they return when the data is
there, so the time inside them is waiting and transfer.

On a GPU the host only queues, and its times say little about the device. There *without computing* is measured by events in the computing
stream and on demand only: from the end of the work queued before settle or publish to the end of theirs, host time that the device had to
wait for included. What the device waits for inside forward and backward, in collectives and in gathers that were not hidden, is not in it:
that is what the traces and idle fractions of ``primus-odc bench`` show. A recorder's spans are host times on a GPU too; the device's, of
the computing stream, are kept where :attr:`Meter.device_spans` is a list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from primus_odc.report.timeline import SpanKind, SpanRecorder

DeviceSpan = tuple[SpanKind, int | None, torch.cuda.Event, torch.cuda.Event]
"""(kind, microbatch, begin, end)."""
_EXPOSED: tuple[SpanKind, ...] = ("wait", "communication", "settle", "publish")
_EXPOSED_ON_GPU: tuple[SpanKind, ...] = ("settle", "publish")
_COMPUTING_STREAM: tuple[SpanKind, ...] = ("forward", "backward", "optimizer", "settle", "publish")
# torch 2.13 renamed them; FSDP2 calls the names of its own version.
_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor")


class Meter:
    """The clock of one rank.

    Attributes:
        recorder: gets every span while it is set.
        time_collectives: whether FSDP2's collectives are timed; if not, stock arms run without anything of ours inside FSDP2, and their
            collectives count as computing.
        exposed_cpu_s: what of the processor this thread used meanwhile; only grows.
        device_spans: on a GPU, while it is a list, gets the spans of the computing stream.
        bytes_gathered: bytes of parameters received in collectives; only grows.
        bytes_reduced: bytes of gradients sent in collectives; only grows.
        collectives_timed: how many of FSDP2's were timed; only grows.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: of the rank; None means the CPU."""
        self._on_gpu = device is not None and device.type == "cuda"
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._exposed_s = 0.0
        self.recorder: SpanRecorder | None = None
        self.device_spans: list[DeviceSpan] | None = None
        self.time_collectives = True
        self.exposed_cpu_s = 0.0
        self.bytes_gathered = 0
        self.bytes_reduced = 0
        self.collectives_timed = 0
        self._inside = False

    @property
    def exposed_s(self) -> float:
        """Seconds in which this rank waited or moved data and computed nothing; only grows. On a GPU it waits for the device to have
        ended what is counted."""
        for begin, end in self._pending:
            end.synchronize()
            self._exposed_s += begin.elapsed_time(end) / 1e3
        self._pending.clear()
        return self._exposed_s

    @property
    def known_s(self) -> float:
        """The same as :attr:`exposed_s` without what the device has not ended yet; nothing is waited for."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.pop(0)
            self._exposed_s += begin.elapsed_time(end) / 1e3
        return self._exposed_s

    @contextmanager
    def span(self, kind: SpanKind, microbatch: int | None = None, label: str = "") -> Iterator[None]:
        """Times the ``with`` block, also when it raises. Of nested exposed spans the outermost counts."""
        counts = kind in (_EXPOSED_ON_GPU if self._on_gpu else _EXPOSED) and not self._inside
        self._inside |= counts
        keeps = self.device_spans is not None and kind in _COMPUTING_STREAM
        begin = _event() if self._on_gpu and (counts or keeps) else None
        start, used = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            end = time.perf_counter()
            stop = _event() if begin is not None else None
            if begin is not None and stop is not None and keeps:
                assert self.device_spans is not None
                self.device_spans.append((kind, microbatch, begin, stop))
            if counts:
                self._inside = False
                if begin is not None and stop is not None:
                    self._pending.append((begin, stop))
                else:
                    self._exposed_s += end - start
                self.exposed_cpu_s += time.thread_time() - used
            if self.recorder is not None:
                self.recorder.add(kind, start, end, microbatch, label)

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Times FSDP2's collectives as long as the ``with`` block runs, if ``time_collectives``."""
        if not self.time_collectives:
            yield
            return
        replaced = {name: self._gather(getattr(dist, name)) for name in _GATHERS if hasattr(dist, name)}
        replaced |= {name: self._reduction(getattr(dist, name)) for name in _REDUCTIONS if hasattr(dist, name)}
        native = {name: getattr(dist, name) for name in replaced}
        vars(dist).update(replaced)
        try:
            yield
        finally:
            vars(dist).update(native)

    def _gather(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes_gathered += output_tensor.nbytes - input_tensor.nbytes
            self.collectives_timed += 1
            with self.span("communication", label="all-gather"):
                return function(output_tensor, input_tensor, *args, **kwargs)

        return timed

    def _reduction(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes_reduced += input.nbytes - output.nbytes
            self.collectives_timed += 1
            with self.span("communication", label="reduce-scatter"):
                return function(output, input, *args, **kwargs)

        return timed


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
