"""What every rank did when, during one minibatch of one arm.

A rank records :class:`Span` objects with :class:`SpanRecorder`; spans may nest (a collective inside a forward), and the innermost one
says what the rank was doing. ``time.perf_counter`` reads the host's one monotonic clock on Linux, so the spans of all processes of a host
share a time axis without any exchange; :func:`make_timeline` moves its zero to the first span.

In a collective the time of one rank does not tell waiting from moving bytes, but the spans of all ranks together do: no collective can
complete before the last rank has joined. :func:`split_collectives` cuts each one there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from primus_odc.errors import DataError

SpanKind = Literal["forward", "backward", "wait", "communication", "settle", "publish", "optimizer", "idle"]
COMPUTE_KINDS: tuple[SpanKind, ...] = ("forward", "backward")


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """One uninterrupted activity of one rank."""

    rank: int
    kind: SpanKind
    """``wait``: for a peer. ``communication``: inside a collective or transfer, waiting included where it is not told apart. ``settle``,
    ``publish``: the engine's own work there, less the waits and transfers nested in it. ``idle``: nothing recorded."""
    start_ms: float
    end_ms: float
    microbatch: int | None = None
    """Index on this rank; None outside forward and backward."""
    label: str = ""
    """Shown as a tooltip. A collective's label is the same on all ranks; repeated labels are matched by order."""
    arrived_ms: float | None = None
    """When this rank joined the collective, where that is earlier than the start of the span (asynchronous launch, later wait)."""

    def __post_init__(self) -> None:
        if self.end_ms < self.start_ms:
            raise DataError(f"rank {self.rank}: span {self.kind} ends at {self.end_ms} ms, before its start at {self.start_ms} ms")

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(kw_only=True, slots=True, frozen=True)
class Timeline:
    """All ranks' exclusive, gap-free spans of one minibatch; 0 ms is the earliest start over all ranks."""

    arm: str
    step: int
    world_size: int
    spans: list[Span]
    """Sorted by rank and start."""

    def __post_init__(self) -> None:
        for span in self.spans:
            if not 0 <= span.rank < self.world_size:
                raise DataError(f"timeline of {self.arm}: a span of rank {span.rank}, but there are {self.world_size} ranks")

    @property
    def end_ms(self) -> float:
        return max((span.end_ms for span in self.spans), default=0.0)

    def totals_ms(self, kind: SpanKind) -> list[float]:
        """Milliseconds of ``kind`` per rank."""
        totals = [0.0] * self.world_size
        for span in self.spans:
            if span.kind == kind:
                totals[span.rank] += span.duration_ms
        return totals


class SpanRecorder:
    """Collects the spans of one rank on the host's monotonic clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._spans: list[Span] = []

    @contextmanager
    def span(self, kind: SpanKind, microbatch: int | None = None, label: str = "") -> Iterator[None]:
        """Records the duration of the ``with`` block, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, start, time.perf_counter(), microbatch, label)

    def add(
        self, kind: SpanKind, start_s: float, end_s: float, microbatch: int | None = None, label: str = "", arrived_s: float | None = None
    ) -> None:
        """Records a span measured elsewhere; seconds on the clock of ``time.perf_counter``."""
        arrived_ms = None if arrived_s is None else arrived_s * 1e3
        span = Span(
            rank=self.rank, kind=kind, start_ms=start_s * 1e3, end_ms=end_s * 1e3, microbatch=microbatch, label=label, arrived_ms=arrived_ms
        )
        self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans recorded since the last call; the recorder is empty afterwards."""
        spans, self._spans = self._spans, []
        return spans


def make_timeline(arm: str, step: int, spans: Sequence[Span], world_size: int) -> Timeline:
    """One minibatch of all ranks: collectives split at the last arrival, nesting resolved, gaps filled with ``idle``, zero moved to the
    first start."""
    origin = min((span.start_ms for span in spans), default=0.0)
    shifted = [
        replace(
            span,
            start_ms=span.start_ms - origin,
            end_ms=span.end_ms - origin,
            arrived_ms=None if span.arrived_ms is None else span.arrived_ms - origin,
        )
        for span in spans
    ]
    end = max((span.end_ms for span in shifted), default=0.0)
    split = split_collectives(shifted, world_size)
    filled: list[Span] = []
    for rank in range(world_size):
        filled.extend(fill_idle(exclusive_spans(span for span in split if span.rank == rank), rank, end))
    return Timeline(arm=arm, step=step, world_size=world_size, spans=filled)


def split_collectives(spans: Sequence[Span], world_size: int) -> list[Span]:
    """Cuts every ``communication`` span that all ranks share into ``wait``, until the last rank arrived, and ``communication``, the rest.

    The n-th span of a label on one rank is the same collective as the n-th one of that label on every other. A span whose label some rank
    lacks is a one-sided transfer, and stays whole.
    """
    groups: dict[tuple[str, int], list[Span]] = defaultdict(list)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    result: list[Span] = []
    for span in sorted(spans, key=lambda item: (item.rank, item.start_ms)):
        if span.kind == "communication" and span.label:
            groups[(span.label, seen[(span.rank, span.label)])].append(span)
            seen[(span.rank, span.label)] += 1
        else:
            result.append(span)
    for members in groups.values():
        if world_size == 1 or len(members) != world_size:
            result.extend(members)
            continue
        last = max(member.start_ms if member.arrived_ms is None else member.arrived_ms for member in members)
        for member in members:
            cut = min(max(last, member.start_ms), member.end_ms)
            result.append(replace(member, kind="wait", end_ms=cut))
            result.append(replace(member, start_ms=cut))
    return [span for span in result if span.duration_ms > 0.0]


def exclusive_spans(spans: Iterable[Span]) -> list[Span]:
    """One rank's spans without overlap: wherever several cover a moment, the one that started last has it."""
    pieces: list[Span] = []
    stack: list[Span] = []
    cursor = 0.0

    def emit(span: Span, end: float) -> None:
        if end > cursor:
            pieces.append(replace(span, start_ms=cursor, end_ms=end))

    for span in sorted(spans, key=lambda item: (item.start_ms, -item.end_ms)):
        while stack and stack[-1].end_ms <= span.start_ms:
            top = stack.pop()
            emit(top, top.end_ms)
            cursor = max(cursor, top.end_ms)
        if stack:
            emit(stack[-1], span.start_ms)
        cursor = span.start_ms
        stack.append(span)
    while stack:
        top = stack.pop()
        emit(top, top.end_ms)
        cursor = max(cursor, top.end_ms)
    return pieces


def fill_idle(spans: Sequence[Span], rank: int, end_ms: float) -> list[Span]:
    """The exclusive spans of one rank with every gap from 0 to ``end_ms`` filled by an ``idle`` span."""
    filled: list[Span] = []
    cursor = 0.0
    for span in spans:
        if span.start_ms > cursor:
            filled.append(Span(rank=rank, kind="idle", start_ms=cursor, end_ms=span.start_ms))
        filled.append(span)
        cursor = span.end_ms
    if end_ms > cursor:
        filled.append(Span(rank=rank, kind="idle", start_ms=cursor, end_ms=end_ms))
    return filled


def compute_table(timeline: Timeline) -> list[list[float]]:
    """[rank][microbatch] milliseconds of forward and backward, with everything nested in them taken off: the input of the ladder.

    Raises:
        DataError: a forward or backward span has no microbatch index.
    """
    rows: list[dict[int, float]] = [defaultdict(float) for _ in range(timeline.world_size)]
    for span in timeline.spans:
        if span.kind in COMPUTE_KINDS:
            if span.microbatch is None:
                raise DataError(f"timeline of {timeline.arm}: a {span.kind} span of rank {span.rank} has no microbatch index")
            rows[span.rank][span.microbatch] += span.duration_ms
    return [[row.get(index, 0.0) for index in range(max(row, default=-1) + 1)] for row in rows]
