from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from primus_odc.bench.png import Canvas, text_width
from primus_odc.bench.timeline_png import COLOURS, draw_timelines
from primus_odc.report.timeline import Span, Timeline

WHITE, RED, BLUE = (255, 255, 255), (200, 10, 20), (1, 2, 203)


def read_png(file: Path) -> npt.NDArray[np.uint8]:
    """By the PNG specification, for the one kind written here: 8-bit RGB, no filter."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        chunks[kind] = content
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour, rest) == (8, 2, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_rectangles_are_where_they_were_drawn(tmp_path: Path) -> None:
    canvas = Canvas(10, 6, WHITE)
    canvas.rectangle(2, 1, 3, 2, RED)
    canvas.rectangle(8.2, 4, 50, 50, BLUE)
    canvas.rectangle(0, 5, 0.01, 0.01, BLUE)
    canvas.write(tmp_path / "new" / "a.png")
    expected = np.full((6, 10, 3), 255, dtype=np.uint8)
    expected[1:3, 2:5] = RED
    expected[4:, 8:] = BLUE
    expected[5, 0] = BLUE
    assert (read_png(tmp_path / "new" / "a.png") == expected).all()


def test_text_can_be_read(tmp_path: Path) -> None:
    canvas = Canvas(text_width("I7", 1), 5, WHITE)
    canvas.text(0, 0, "i7", BLUE, scale=1)
    drawn = (canvas.pixels != 255).any(axis=2)
    picture = ["".join("#" if dot else "." for dot in row) for row in drawn]
    assert picture == ["###.###.", ".#....#.", ".#....#.", ".#....#.", "###...#."]


@pytest.mark.parametrize("kind", ["forward", "wait"])
def test_a_span_covers_its_part_of_its_ranks_row(tmp_path: Path, kind: str) -> None:
    spans = [
        Span(rank=0, kind="backward", start_ms=0, end_ms=100, microbatch=0),
        Span(rank=1, kind="backward", start_ms=0, end_ms=50, microbatch=0),
        Span(rank=1, kind=kind, start_ms=50, end_ms=100),  # type: ignore[arg-type]
    ]
    draw_timelines(tmp_path / "t.png", [Timeline(arm="odc_nopad", step=0, world_size=2, spans=spans)])
    pixels = read_png(tmp_path / "t.png")
    backward = (pixels == COLOURS["backward"][0]).all(axis=2)[50:]  # below the legend
    colour, hatch = COLOURS[kind]  # type: ignore[index]
    other = ((pixels == colour) | (pixels == (hatch or colour))).all(axis=2)[50:]
    full, half = backward.sum(axis=1).max(), other.sum(axis=1).max()
    assert full == pytest.approx(2 * half, rel=0.01)
    rows = np.flatnonzero(other.sum(axis=1) > 100)
    assert (backward[rows].sum(axis=1) == pytest.approx(half, abs=2)) and len(rows) == 22
