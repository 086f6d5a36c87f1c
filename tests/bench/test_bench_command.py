"""The benchmark itself, small and on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from primus_odc.bench.summary import summarise
from primus_odc.cli import main
from tests.forked_ranks import main_with_forked_ranks
from tests.workers import Program

ARMS = ["nccl_pad", "nccl_zero2", "nccl_localsort", "odc_pad", "odc_nopad", "odc_nopad:resident", "odc_nopad:owner", "ideal"]
SMALL = ["--device", "cpu", "--shape", "tiny", "--layers", "1", "--nproc", "2", "--timeout-s", "50"]


def bench(folder: Path, *words: str, status: int = 0) -> str:
    """What it printed to stderr."""
    process = Program(main_with_forked_ranks, "bench", *words, folder=folder, name="bench")
    process.wait(100)
    assert process.returncode == status, process.stderr
    return process.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(the only entry, the folder)"""
    folder = tmp_path_factory.mktemp("bench")
    words = ["--points", "2:8192", "--minibatches", "3", "--arms", *ARMS, "--out", str(folder / "r.json"), "--trace", str(folder / "trace")]
    assert main(["bench", "train", *words, *SMALL, "--commit", "abc"]) == 0
    content = json.loads((folder / "r.json").read_text())
    (run,) = content["runs"]
    assert run["commit"] == "abc"
    (entry,) = run["entries"]
    return entry, folder


@pytest.mark.timeout(180)
def test_all_arms_run_the_same_minibatches(measured: tuple[dict[str, Any], Path]) -> None:
    entry, _ = measured
    assert list(entry["steps"]) == ARMS and (entry["samples_per_rank"], entry["cap"]) == (2, 128)
    for name, steps in entry["steps"].items():
        assert [step["minibatch"] for step in steps] == [0, 1, 2]
        for step, reference in zip(steps, entry["steps"]["nccl_pad"], strict=True):
            lengths = sorted(n for rank in step["microbatches"] for bucket in rank for n in bucket)
            assert lengths == sorted(n for rank in reference["microbatches"] for bucket in rank for n in bucket) and len(lengths) == 4
            assert step["target_tokens"] == sum(lengths) - 4
            if name != "ideal":
                expected = sum(rank["loss_sum"] for rank in reference["ranks"])
                assert sum(rank["loss_sum"] for rank in step["ranks"]) == pytest.approx(expected, rel=1e-5), name
                norm = pytest.approx(reference["ranks"][0]["grad_norm"], rel=1e-4)
                assert all(rank["grad_norm"] == norm for rank in step["ranks"]), name
            for rank in step["ranks"]:
                assert 0 <= rank["computed_at"] <= rank["settled_at"] <= rank["clipped_at"] <= rank["updated_at"]
                assert rank["ms"] > 0 and sum(rank["microbatch_ms"]) <= rank["computed_at"] + 1e-6
                assert (rank["bytes_reduced"] is not None) == name.startswith("odc")
    assert entry["steps"]["odc_pad"][0]["microbatches"] == entry["steps"]["nccl_pad"][0]["microbatches"]
    assert [arm.arm for arm in summarise([entry])[0].arms] == ARMS


def test_traces_and_a_picture_are_there(measured: tuple[dict[str, Any], Path]) -> None:
    _, folder = measured
    (point,) = (folder / "trace").iterdir()
    assert (point / "timeline.png").stat().st_size > 1000
    for name in ARMS:
        with gzip.open(point / f"{name.replace(':', '-')}.trace.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}, name
        kinds = {event["cat"] for event in events if event["ph"] == "X"}
        assert {"forward", "backward", "optimizer"} <= kinds and ("communication" in kinds) == (name != "ideal"), name


@pytest.mark.timeout(120)
def test_one_model_can_serve_all_arms(tmp_path: Path) -> None:
    words = ["--points", "1:8192", "--minibatches", "2", "--sequence", "1", "--out", str(tmp_path / "r.json"), "--share-model"]
    arms = ["nccl_zero2", "odc_nopad:resident", "nccl_pad", "odc_nopad", "ideal"]
    bench(tmp_path, "train", *words, "--arms", *arms, *SMALL)
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    steps = run["entries"][0]["steps"]
    for minibatch in (0, 1):
        losses = [sum(rank["loss_sum"] for rank in arm[minibatch]["ranks"]) for name, arm in steps.items() if name != "ideal"]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.timeout(120)
def test_what_the_budget_does_not_allow_is_not_run(tmp_path: Path) -> None:
    words = ["--points", "1:8192", "--minibatches", "2", "--out", str(tmp_path / "r.json"), "--arms", "nccl_pad", "--budget-s", "0.001"]
    told = bench(tmp_path, "train", *words, *SMALL, status=2)
    assert "--budget-s 0.001" in told and "nothing was measured" in told
    assert not (tmp_path / "r.json").exists()


@pytest.mark.timeout(120)
def test_transfers_are_measured_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    words = ["--sizes", "64K", "1M", "--repeats", "2", "--device", "cpu", "--nproc", "2", "--timeout-s", "50", "--out", str(out)]
    bench(tmp_path, "primitives", *words)
    assert main(["bench", "report", str(out), str(out), "--merged", str(tmp_path / "m.json")]) == 0
    printed = capsys.readouterr().out
    assert [line.split(" | ")[:2] for line in printed.splitlines() if line.startswith(("| gather", "| scatter"))] == [
        ["| gather", "0.0625"],
        ["| scatter-accumulate", "0.125"],
        ["| gather", "1"],
        ["| scatter-accumulate", "2"],
    ]
    assert json.loads((tmp_path / "m.json").read_text()) == json.loads(out.read_text())


def test_wrong_words_are_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--points", "2", "--device", "cpu", "--out", str(tmp_path / "r.json")]
    assert main(["bench", "train", *words, "--arms", "nccl_pad", "odc"]) == 2
    assert "--arms odc: known are" in capsys.readouterr().err
    assert main(["bench", "train", *words, "--shape", "tiny", "--cap", "127"]) == 2
    assert "a cap of 1 (after --shape tiny divided it by 64) is too small" in capsys.readouterr().err
    assert main(["bench", "report", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (["train", "--points", "4", "x:8"], "argument --points: 'x' is not a whole number of at least 1"),
        (["train", "--points", "4:"], "argument --points: '' is not a whole number of at least 1"),
        (["train", "--points", "4", "--nproc", "0"], "argument --nproc: '0' is not a whole number of at least 1"),
        (["train", "--points", "4", "--seed", "-1"], "argument --seed: '-1' is not a whole number of at least 0"),
        (["primus", "--layers", "0"], "argument --layers: '0' is not a whole number of at least 1"),
        (["primitives", "--sizes", "12Q"], "argument --sizes: '12Q' is not a number of bytes; write 65536, 64K, 16M or 1G"),
        (["primitives", "--sizes", "1M", "0K"], "argument --sizes: '0K' is not a number of bytes"),
    ],
)
def test_words_that_are_no_numbers(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words, "--device", "cpu", "--out", "r.json"])
    assert caught.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_keys_of_the_engine_reach_it(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["--points", "1:4096", "--minibatches", "1", "--arms", "odc_nopad", "--odc.transport", "host", "--odc.ranks_per_node", "1"]
    bench(tmp_path, "train", *words, "--out", str(out), *SMALL)
    (run,) = json.loads(out.read_text())["runs"]
    (entry,) = run["entries"]
    assert (entry["transport"], entry["ranks_per_node"]) == ("host", 1)
    stderr = (tmp_path / "bench.stderr").read_text() + (tmp_path / "bench.stdout").read_text()
    assert "staging 0.0" in stderr and "fan_out 0.0" in stderr, stderr
