"""The comparison for real: the smoke configuration in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from primus_odc._locks import FOLDER_LOCK, lock_folder
from primus_odc.errors import ConfigError, DataError
from primus_odc.megatron.compare import run_job
from primus_odc.megatron.compare_job import arm_params
from primus_odc.report.ladder import free_ms, lockstep_ms
from primus_odc.report.result import ComparisonResult
from tests.forked_ranks import main_with_forked_ranks
from tests.megatron.test_local_ranks import ROOT, children, end_by, gone
from tests.workers import Program

SMOKE = ROOT / "configs" / "smoke.yaml"
STEPS, RANKS = 3, 2
ARMS = ["nccl_pad", "nccl_zero2", "odc_pad", "odc_nopad"]
ONE: dict[str, Any] = {"arms": ARMS, "steps": 1, "nproc": 2, "command": "", "result": Path("never-written.json")}


def words_of(folder: Path, *words: str) -> list[str]:
    """``compare`` with the smoke configuration; everything it writes goes to ``folder``."""
    return ["compare", str(SMOKE), "--nproc", str(RANKS), "--output", str(folder / "out"), f"--data_cache_path={folder / 'cache'}", *words]


def forked(folder: Path, *words: str) -> Program:
    return Program(main_with_forked_ranks, *words_of(folder, *words), folder=folder, name="compare")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[ComparisonResult, str, str]:
    folder = tmp_path_factory.mktemp("smoke")
    done = subprocess.run(
        [sys.executable, "-m", "primus_odc", *words_of(folder, "--steps", str(STEPS), "--arms", ",".join(ARMS))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (folder / "out" / "index.html").read_text()
    return ComparisonResult.read(folder / "out" / "result.json"), done.stdout, page


@pytest.mark.timeout(180)
def test_result_is_complete(smoke: tuple[ComparisonResult, str, str]) -> None:
    result, _, _ = smoke
    assert [arm.arm for arm in result.arms] == ARMS
    assert result.warmup_steps == 2 and result.steps == [2]
    for arm in result.arms:
        assert arm.world_size == RANKS and len(arm.ms_per_step) == STEPS
        assert all(0 < share < 1 for share in arm.idle_fraction), arm.arm
        assert arm.phases is not None and (arm.phases.wait_ms is None) == arm.arm.startswith("nccl")
        assert arm.tokens == result.arms[0].tokens
        assert [[len(row) for row in step] for step in arm.microbatch_ms or []] == arm.microbatches
    assert result["odc_pad"].microbatches == result["nccl_pad"].microbatches
    assert all(len(set(step)) == 1 for step in result["nccl_pad"].microbatches)
    for balanced, padded in zip(result["odc_nopad"].microbatches, result["odc_pad"].microbatches, strict=True):
        assert sum(balanced) <= sum(padded)  # whether counts differ in three steps depends on the text
    assert set(result.speedup) == set(ARMS) - {"nccl_pad"}
    assert result.ideal_ms is not None and result.ideal_ms > 0 and len(result.ideal_ms_per_step or []) == STEPS
    assert result.machine["collectives"] == "gloo" and result.config["hidden_size"] == 64 and result.seed == 1234


def test_arms_agree(smoke: tuple[ComparisonResult, str, str]) -> None:
    result, _, _ = smoke
    assert set(result.agreement) == set(ARMS) - {"nccl_pad"}
    assert max(result.agreement.values()) <= 1e-5
    for arm in result.arms:
        assert arm.grad_norm == pytest.approx(result["nccl_pad"].grad_norm, rel=1e-4)


def test_ladder_comes_from_compute_times(smoke: tuple[ComparisonResult, str, str]) -> None:
    result, _, _ = smoke
    assert result.ladder is not None and result.ladder.split is not None
    padded, balanced = result["odc_pad"].microbatch_ms, result["odc_nopad"].microbatch_ms
    assert padded is not None and balanced is not None
    assert result.ladder.split.lockstep_ms == pytest.approx(lockstep_ms(padded[2]))
    assert result.ladder.split.free_balanced_ms == pytest.approx(free_ms(balanced[2]))


def test_timelines_show_one_minibatch_of_every_arm(smoke: tuple[ComparisonResult, str, str]) -> None:
    result, _, page = smoke
    assert [timeline.arm for timeline in result.timelines] == ARMS
    assert len({timeline.step for timeline in result.timelines}) == 1
    for timeline in result.timelines:
        kinds = {span.kind for span in timeline.spans}
        assert {"forward", "backward", "communication", "optimizer"} <= kinds, timeline.arm
        assert ("settle" in kinds) == timeline.arm.startswith("odc")
        step = timeline.step
        microbatches = {(span.rank, span.microbatch) for span in timeline.spans if span.microbatch is not None}
        assert microbatches == {(rank, m) for rank, count in enumerate(result[timeline.arm].microbatches[step]) for m in range(count)}
    assert "What every rank did in step" in page


def test_terminal_says_it_all(smoke: tuple[ComparisonResult, str, str]) -> None:
    _, out, _ = smoke
    for words in ("ladder, ms per step", "removed waiting", "removed padding", "gloo", "of ideal", "agree", "written:"):
        assert words in out or words in out.replace("\n  ", " ")


@pytest.mark.timeout(180)
def test_arms_agree_across_nodes(tmp_path: Path) -> None:
    """A node of two ranks and one of one, from the YAML's keys alone."""
    process = forked(tmp_path, "--nproc", "3", "--steps", "2", "--odc.ranks_per_node", "2")
    process.wait(150)
    assert process.returncode == 0, process.stderr
    result = ComparisonResult.read(tmp_path / "out" / "result.json")
    assert [arm.arm for arm in result.arms] == ["nccl_pad", "odc_pad", "odc_nopad"] and result.arms[0].world_size == 3
    assert max(result.agreement.values()) <= 1e-5
    (note,) = [note for note in result.notes if "odc.ranks_per_node" in note]
    assert "taken for 2 nodes" in note and " 0.0 MB" not in note


@pytest.mark.timeout(180)
def test_a_killed_rank_is_named_and_nothing_stays(tmp_path: Path) -> None:
    process = forked(tmp_path, "--steps", "10000")
    try:
        process.until("\nstep ", 100)
        ranks = children(process.pid)
        assert len(ranks) == RANKS
        os.kill(ranks[1], signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "rank 1 was killed by SIGKILL" in process.stderr
    assert all(gone(pid) for pid in ranks)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [FOLDER_LOCK]  # no result, and the folder is free
    lock_folder(tmp_path / "out", "--output", busy="still held").close()


@pytest.mark.timeout(180)
def test_an_interrupted_comparison_says_so_and_leaves_no_rank(tmp_path: Path) -> None:
    process = forked(tmp_path, "--steps", "10000")
    ranks = end_by(signal.SIGINT, process, "\nstep ", within_s=100, ends_in_s=60)
    assert process.returncode == 130
    assert process.stderr.endswith("primus-odc: interrupted\n") and "Traceback" not in process.stderr
    assert len(ranks) == RANKS and all(gone(pid) for pid in ranks)


@pytest.mark.timeout(180)
def test_what_a_rank_refuses_is_told(tmp_path: Path) -> None:
    # Enough for a step, which is all that is read before ranks are started.
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 9 + '{"messages": 3}\n')
    process = forked(tmp_path, "--sft_dataset_name", str(tmp_path / "bad.jsonl"))
    process.wait(120)
    assert process.returncode == 2
    err = process.stderr
    assert "ranks 0, 1 failed with exit status 2" in err and err.count("sample 'bad.jsonl:10'") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["--train_itres", "3"], "train_iters"),
        (["--distributed_backend", "nccl"], "gloo"),
        (["odc.timeout=3"], "timeout_s"),
        (["--odc", "0"], "odc must be a block of keys, but the number 0 was given"),
        (["--odc", "[timeout_s]"], r"odc must be a block of keys, but the list \['timeout_s'\] was given"),
        (["--sft_dataset_name", "absent.jsonl"], "no such path"),
        (["--sft_max_samples", "7"], "global_batch_size: 8 is more than the 7 samples to train on"),
        (["--sft_max_samples", "7", "--train_itres", "3"], "(?s)2 problems.*train_itres .*global_batch_size: 8 is more than the 7"),
        # The model's keys are told along.
        (["--lr", "-1", "--num_layers", "0", "--train_itres", "3"], "(?s)3 problems.*lr is .*train_itres .*num_layers: "),
        (["--lr_warmup_iters", "9"], "the warm-up of 9 steps .* must be shorter than lr_decay_iters"),
    ],
)
def test_wrong_keys_are_refused_before_any_process(overrides: Sequence[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_job(SMOKE, overrides=overrides, **ONE, before_start=never)


def test_what_is_wrong_is_all_that_is_said() -> None:
    """megatron-core warns of whatever is not installed when it is imported, a screenful above the message."""
    words = ["-c", "import sys; from primus_odc.cli import main; sys.exit(main())", "compare", str(SMOKE), "--train_itres", "3"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0].startswith("primus-odc: error:") and "Warning" not in ended.stderr, ended.stderr


def never() -> None:
    raise AssertionError("ranks would be started")


def test_a_folder_that_is_taken_is_told_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> None:
        raise DataError("taken")

    monkeypatch.setattr("primus_odc.megatron.compare.run_ranks", lambda *words, **options: never())
    with pytest.raises(DataError, match="taken"):
        run_job(SMOKE, overrides=[], **ONE, before_start=taken)


def test_no_launcher_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        run_job(SMOKE, overrides=[], **ONE, before_start=never)


def test_an_arm_is_chosen_by_its_reporting_name() -> None:
    params = {"lr": 1.0, "comm_backend": "odc_pad", "odc": {"timeout_s": 5, "baseline": "zero2"}}
    assert arm_params(params, "nccl_localsort") == {"lr": 1.0, "comm_backend": "nccl_pad", "odc": {"timeout_s": 5, "baseline": "localsort"}}
    assert arm_params(params, "odc_nopad") == {"lr": 1.0, "comm_backend": "odc_nopad", "odc": {"timeout_s": 5}}
    assert params["odc"] == {"timeout_s": 5, "baseline": "zero2"}
