from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from primus_odc.data.sources import JsonlSource, RowSource
from primus_odc.errors import DataError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def test_jsonl_ids_are_lines_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", '\ufeff{"text": "one"}\n\n  \n{"text": "two"}')
    second = write(tmp_path / "sub/b.jsonl", '{"text": "three"}\r\n')
    source = JsonlSource([first, second], tmp_path, "text")
    for _ in range(2):
        records = list(source)
        assert [(r.sample_id, r.turns[0].text) for r in records] == [("a.jsonl:1", "one"), ("a.jsonl:4", "two"), ("sub/b.jsonl:1", "three")]
    assert len(source) == 3


@pytest.mark.parametrize(
    ("line", "reason"), [("{broken", "not a JSON line"), ("[" * 100000, "not a JSON line"), ("[1]", "JSON object is wanted, not list")]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"a.jsonl:2 .*{reason}"):
        list(JsonlSource([file], tmp_path, "text"))


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1 .*not a JSON line"):
        list(JsonlSource([file], tmp_path, "text"))


def test_fingerprint_follows_content_and_form_but_not_the_place(tmp_path: Path) -> None:
    file = write(tmp_path / "one/a.jsonl", '{"text": "one"}\n')
    before = JsonlSource([file], file.parent, "text").fingerprint
    moved = Path(shutil.copytree(file.parent, tmp_path / "two")) / "a.jsonl"
    assert JsonlSource([moved], moved.parent, "text").fingerprint == before
    assert JsonlSource([moved], moved.parent, "conversation").fingerprint != before
    write(moved, '{"text": "One"}\n')
    assert JsonlSource([moved], moved.parent, "text").fingerprint != before


def test_rows() -> None:
    source = RowSource("rows", [{"text": "a"}, {"text": "b"}], "text")
    assert [(r.sample_id, r.turns[0].text) for r in source] == [("rows:0", "a"), ("rows:1", "b")] and len(source) == 2
    assert source.fingerprint == RowSource("rows", [{"text": "a"}, {"text": "b"}], "text").fingerprint
    assert source.fingerprint != RowSource("rows", [{"text": "b"}, {"text": "a"}], "text").fingerprint
