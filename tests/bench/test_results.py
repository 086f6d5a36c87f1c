from __future__ import annotations

from pathlib import Path

import pytest

from primus_odc.bench.results import append, load, merge
from primus_odc.errors import DataError

RUN = {"commit": "abc", "machine": {"cpu": "X"}, "versions": {"torch": "2.11.0"}}


def test_a_file_grows_by_commit_and_machine(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    assert load(file) == {"format": 1, "runs": []}
    append(file, RUN, {"kind": "train", "cap": 1})
    append(file, RUN, {"kind": "train", "cap": 2})
    append(file, {**RUN, "commit": "def"}, {"kind": "train", "cap": 3})
    append(file, {**RUN, "machine": {"cpu": "Y"}}, {"kind": "train", "cap": 4})
    runs = load(file)["runs"]
    assert [[entry["cap"] for entry in run["entries"]] for run in runs] == [[1, 2], [3], [4]]
    assert [run["commit"] for run in runs] == ["abc", "def", "abc"]
    assert list(file.parent.iterdir()) == [file]


def test_files_of_several_calls_are_put_together_once(tmp_path: Path) -> None:
    append(tmp_path / "a.json", RUN, {"kind": "train", "cap": 1})
    append(tmp_path / "b.json", RUN, {"kind": "train", "cap": 2})
    content = load(tmp_path / "a.json")
    for name in ("a.json", "b.json", "b.json"):
        merge(content, load(tmp_path / name))
    assert [[entry["cap"] for entry in run["entries"]] for run in content["runs"]] == [[1, 2]]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "runs": []}', '{"format": 1}'])
def test_another_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(DataError, match="choose another --out"):
        append(file, RUN, {"kind": "train"})
    assert file.read_text() == text
