"""Spans: nesting, collectives cut at the last arrival, idle gaps, and the compute table made of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.errors import DataError
from primus_odc.report import schema
from primus_odc.report.timeline import Span, SpanRecorder, Timeline, compute_table, exclusive_spans, make_timeline, split_collectives


def shape(spans: list[Span]) -> list[tuple[int, str, float, float]]:
    return [(span.rank, span.kind, span.start_ms, span.end_ms) for span in spans]


def test_inner_span_cuts_the_outer() -> None:
    spans = [
        Span(rank=0, kind="forward", start_ms=0, end_ms=10, microbatch=0),
        Span(rank=0, kind="communication", start_ms=2, end_ms=5),
        Span(rank=0, kind="wait", start_ms=3, end_ms=4),
    ]
    assert shape(exclusive_spans(spans)) == [
        (0, "forward", 0, 2),
        (0, "communication", 2, 3),
        (0, "wait", 3, 4),
        (0, "communication", 4, 5),
        (0, "forward", 5, 10),
    ]


def test_collective_is_cut_where_the_last_rank_arrives() -> None:
    spans = [
        Span(rank=0, kind="communication", start_ms=1, end_ms=9, label="all_gather"),
        Span(rank=1, kind="communication", start_ms=6, end_ms=9, label="all_gather"),
        Span(rank=0, kind="communication", start_ms=20, end_ms=22, label="all_gather"),
        Span(rank=1, kind="communication", start_ms=18, end_ms=22, label="all_gather"),
    ]
    assert sorted(shape(split_collectives(spans, 2))) == [
        (0, "communication", 6, 9),
        (0, "communication", 20, 22),
        (0, "wait", 1, 6),
        (1, "communication", 6, 9),
        (1, "communication", 20, 22),
        (1, "wait", 18, 20),
    ]


def test_collective_joined_before_it_was_waited_for() -> None:
    """Rank 1 launched at 2 and only waits from 8 on; rank 0, waiting from 1, is kept by rank 1 until 2 and by the transfer afterwards."""
    spans = [
        Span(rank=0, kind="communication", start_ms=1, end_ms=9, label="a"),
        Span(rank=1, kind="communication", start_ms=8, end_ms=9, label="a", arrived_ms=2),
    ]
    assert sorted(shape(split_collectives(spans, 2))) == [(0, "communication", 2, 9), (0, "wait", 1, 2), (1, "communication", 8, 9)]


def test_one_sided_transfer_stays_whole() -> None:
    spans = [Span(rank=0, kind="communication", start_ms=1, end_ms=9, label="gather from 1")]
    assert split_collectives(spans, 2) == spans


def test_timeline_starts_at_zero_and_has_no_gaps() -> None:
    spans = [
        Span(rank=1, kind="forward", start_ms=105, end_ms=110, microbatch=0),
        Span(rank=0, kind="backward", start_ms=100, end_ms=104, microbatch=0),
        Span(rank=0, kind="optimizer", start_ms=110, end_ms=112),
    ]
    timeline = make_timeline("odc_pad", 3, spans, 2)
    assert shape(timeline.spans) == [
        (0, "backward", 0, 4),
        (0, "idle", 4, 10),
        (0, "optimizer", 10, 12),
        (1, "idle", 0, 5),
        (1, "forward", 5, 10),
        (1, "idle", 10, 12),
    ]
    assert timeline.end_ms == 12
    assert timeline.totals_ms("idle") == [6, 7]
    assert schema.decode(Timeline, schema.encode(timeline)) == timeline


def test_compute_table_leaves_communication_out() -> None:
    spans = [
        Span(rank=0, kind="forward", start_ms=0, end_ms=10, microbatch=0),
        Span(rank=0, kind="communication", start_ms=4, end_ms=7),
        Span(rank=0, kind="backward", start_ms=10, end_ms=25, microbatch=0),
        Span(rank=0, kind="forward", start_ms=25, end_ms=26, microbatch=1),
    ]
    assert compute_table(make_timeline("odc_pad", 0, spans, 2)) == [[22, 1], []]
    with pytest.raises(DataError, match="microbatch"):
        compute_table(make_timeline("odc_pad", 0, [Span(rank=0, kind="forward", start_ms=0, end_ms=1)], 1))


def test_recorder_nests_and_empties() -> None:
    recorder = SpanRecorder(rank=2)
    with recorder.span("forward", microbatch=1, label="outer"), recorder.span("wait", label="inner"):
        pass
    inner, outer = recorder.take()
    assert (inner.kind, outer.kind, outer.rank, outer.microbatch) == ("wait", "forward", 2, 1)
    assert outer.start_ms <= inner.start_ms <= inner.end_ms <= outer.end_ms
    assert recorder.take() == []


def test_impossible_spans_are_refused() -> None:
    with pytest.raises(DataError, match="before its start"):
        Span(rank=0, kind="wait", start_ms=2, end_ms=1)
    with pytest.raises(DataError, match="rank 3"):
        Timeline(arm="a", step=0, world_size=2, spans=[Span(rank=3, kind="wait", start_ms=0, end_ms=1)])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=12))
def test_exclusive_spans_cover_each_moment_once(pairs: list[tuple[int, int]]) -> None:
    """Against a paint-by-millisecond reference: later starts paint over earlier ones."""
    spans = [Span(rank=0, kind="wait", start_ms=start, end_ms=start + length, label=str(i)) for i, (start, length) in enumerate(pairs)]
    painted: dict[int, str] = {}
    for span in sorted(spans, key=lambda item: (item.start_ms, -item.end_ms)):
        for moment in range(int(span.start_ms), int(span.end_ms)):
            painted[moment] = span.label
    pieces = exclusive_spans(spans)
    got = {moment: piece.label for piece in pieces for moment in range(int(piece.start_ms), int(piece.end_ms))}
    assert got == painted
    assert sum(piece.duration_ms for piece in pieces) == len(painted)
