from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from primus_odc.data.cache import cache_key, open_cache, open_or_build
from primus_odc.data.samples import Sample
from primus_odc.errors import DataError
from tests.data.data_helpers import THREE, make_cache, make_sample

FILES = ("tokens.i4", "targets.u1", "offsets.i8", "target_counts.i8", "ids.json")

BUILDER = """
import os, sys, time
from pathlib import Path
import numpy as np
from primus_odc.data.cache import open_or_build
from primus_odc.data.samples import Sample

def samples(directory, pause):
    (directory / f"built-by-{os.getpid()}").touch()
    for i in range(10):
        if i == 5:
            print("half", flush=True)
            time.sleep(pause)
        yield Sample(sample_id=f"s{i}", tokens=np.arange(i + 1, dtype=np.int32), target_mask=np.arange(i + 1) > 0)

directory = Path(sys.argv[1])
cache = open_or_build(directory, {"source": "worker"}, samples(directory, float(sys.argv[2])), "worker", 30.0)
print("opened", len(cache.ids), int(cache.tokens.sum()), flush=True)
"""
OPENED = f"opened 10 {sum(sum(range(i + 1)) for i in range(10))}\n"


def start(directory: Path, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(directory), str(pause)], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    return output.splitlines(keepends=True)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    assert cache.tokens.tolist() == [5, 6, 7, 9, 1, 2, 3, 4, 8] and cache.tokens.dtype == np.int32
    assert np.flatnonzero(cache.target_mask).tolist() == [1, 2, 7, 8] and cache.target_mask.dtype == np.bool_
    assert cache.offsets.tolist() == [0, 3, 4, 9] and cache.target_counts.tolist() == [2, 0, 2] and cache.ids == ("a", "b", "c")
    with pytest.raises(ValueError, match="read-only"):
        cache.tokens[0] = 1


def test_an_existing_entry_is_not_built_again(tmp_path: Path) -> None:
    def never() -> Iterator[Sample]:
        pytest.fail("built again")
        yield from THREE

    first = make_cache(tmp_path)
    again = open_or_build(tmp_path, {"count": 3, "source": "helper"}, never(), "helper", 5.0)
    assert again.path == first.path and again.ids == first.ids


def test_every_part_changes_the_key() -> None:
    keys = {cache_key(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1, "b": None})}
    assert len(keys) == 5 and all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_damage_is_found_and_says_what_to_delete(tmp_path: Path, name: str, damage: str) -> None:
    cache = make_cache(tmp_path)
    content = bytearray((cache.path / name).read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "cut":
        content.pop()
    elif damage == "longer":
        content.append(0)
    (cache.path / name).write_bytes(content)
    if damage == "gone":
        (cache.path / name).unlink()
    with pytest.raises(DataError, match=f"{cache.path} is damaged: {name} .*delete this folder"):
        make_cache(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"samples": 3, "files": {}}'])
def test_a_damaged_manifest_is_found(tmp_path: Path, content: str) -> None:
    cache = make_cache(tmp_path)
    (cache.path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json cannot be read"):
        open_cache(cache.path)


def test_files_that_disagree_with_each_other_are_found(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    manifest = json.loads((cache.path / "manifest.json").read_text())
    (cache.path / "manifest.json").write_text(json.dumps({**manifest, "samples": 4}))
    with pytest.raises(DataError, match="do not agree on 4 samples and 9 tokens"):
        open_cache(cache.path)


def test_bad_content_is_refused_and_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="helper: the source has no sample"):
        make_cache(tmp_path, [])
    with pytest.raises(DataError, match="sample id 'x' occurs more than once"):
        make_cache(tmp_path, [make_sample("y", [1], []), make_sample("x", [1], []), make_sample("x", [2], [])])
    assert make_cache(tmp_path, [make_sample("x", [1], [])]).ids == ("x",)


def test_an_error_in_the_source_is_retried_by_the_next(tmp_path: Path) -> None:
    def broken() -> Iterator[Sample]:
        yield THREE[0]
        raise DataError("line 2")

    with pytest.raises(DataError, match="line 2"):
        open_or_build(tmp_path, {"source": "helper", "count": 3}, broken(), "helper", 5.0)
    assert make_cache(tmp_path).ids == ("a", "b", "c")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_of_several_processes_one_builds_and_all_open(tmp_path: Path) -> None:
    workers = [start(tmp_path, 0.5) for _ in range(3)]
    outputs = [finish(worker) for worker in workers]
    assert sorted(map(len, outputs)) == [1, 1, 2] and all(output[-1] == OPENED for output in outputs)
    assert len(list(tmp_path.glob("built-by-*"))) == 1


def test_a_killed_builder_is_replaced_by_the_waiting_process(tmp_path: Path) -> None:
    first = start(tmp_path, 60.0)
    assert first.stdout is not None and first.stdout.readline() == "half\n"
    second = start(tmp_path, 0.0)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=20)
    assert finish(second) == ["half\n", OPENED]
    assert len(list(tmp_path.glob("built-by-*"))) == 2 and not list(tmp_path.glob("*.partial-*"))
