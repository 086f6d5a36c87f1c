"""Named distributions have the stated shape; files are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from primus_odc.errors import PlanError
from primus_odc.planning.lengths import named_distribution, read_lengths


@pytest.mark.parametrize(
    ("name", "mean", "p50", "p90", "p99", "limits"),
    [
        ("longalign-like", 16300, 14000, 28800, 49700, (1000, 65536)),
        ("swesmith-like", 33500, 27700, 63300, 110000, (1800, 131072)),
    ],
)
def test_distributions(name: str, mean: float, p50: float, p90: float, p99: float, limits: tuple[int, int]) -> None:
    distribution = named_distribution(name)
    assert distribution is not None
    lengths = distribution.sample(200_000, seed=1)
    assert lengths.dtype == np.int64 and lengths.shape == (200_000,)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    np.testing.assert_allclose(np.percentile(lengths, [50, 90, 99]), [p50, p90, p99], rtol=0.015)
    assert limits[0] <= lengths.min() and lengths.max() <= limits[1]
    np.testing.assert_array_equal(distribution.sample(100, seed=7), distribution.sample(100, seed=7))
    assert (distribution.sample(100, seed=7) != distribution.sample(100, seed=8)).any()


def test_divisor() -> None:
    whole, small = named_distribution("longalign-like"), named_distribution("longalign-like/64")
    assert whole is not None and small is not None
    np.testing.assert_array_equal(small.sample(500, seed=3), whole.sample(500, seed=3) // 64)


@pytest.mark.parametrize("name", ["longalign", "longalign-like/0", "longalign-like/-2", "longalign-like/x", "lengths.txt", "a/b"])
def test_other_names(name: str) -> None:
    assert named_distribution(name) is None


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".txt", "3 5\n8\n\n13\n"),
        (".json", '[3, {"length": 5, "id": "x"}, 8, 13]'),
        (".jsonl", '3\n{"length": 5}\n\n8\n13\n'),
    ],
)
def test_files(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"lengths{suffix}"
    path.write_text(text)
    assert read_lengths(path).tolist() == [3, 5, 8, 13]


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".txt", "3 five", "five"),
        (".txt", "", "no list"),
        (".txt", "3 0", "entry 2"),
        (".json", '{"length": 3}', "no list"),
        (".json", "[3, ", "not a file of sample lengths"),
        (".json", "[" * 100000, "not a file of sample lengths"),
        (".json", "[3, true]", "entry 2"),
        (".jsonl", '3\n{"len": 4}', "entry 2 .* is {"),
        (".jsonl", "3\n2.5", "entry 2"),
        (".json", f"[3, {2**40 + 1}]", "entry 2 .* from 1 to 1099511627776"),
        (".txt", "3 1" + "0" * 30, "entry 2 .* from 1 to 1099511627776"),
    ],
)
def test_bad_files(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    path = tmp_path / f"lengths{suffix}"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_lengths(path)


@pytest.mark.parametrize("before", range(8))
@pytest.mark.parametrize("character", ["\u6f22", '"', "\\", "\n"])
def test_a_long_entry_is_not_cut_inside_an_escape(character: str, before: int, tmp_path: Path) -> None:
    text = "x" * before + character * 80
    (tmp_path / "chat.jsonl").write_text(json.dumps({"t": text}))
    with pytest.raises(PlanError) as caught:
        read_lengths(tmp_path / "chat.jsonl")
    shown, _, rest = str(caught.value).partition("chat.jsonl is ")[2].rpartition("...; a sample length is ")
    assert rest and 80 - 6 < len(shown) <= 80
    assert text.startswith(json.loads(shown + '"}')["t"])


def test_missing_file_names_the_distributions(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="longalign-like or swesmith-like"):
        read_lengths(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("name", "meant"), [("longalign_like", "longalign-like"), ("swe-smith/64", "swesmith-like"), ("lengths.txt", None)]
)
def test_misspelt_distributions(name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        read_lengths(name)
    assert str(caught.value).endswith(f"; did you mean {meant}?" if meant else "optionally with /64")
