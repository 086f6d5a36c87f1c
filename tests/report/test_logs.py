"""Step logs: writing, resuming, torn lines, and which two runs can be compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from primus_odc.errors import DataError
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, compare_logs, read_step_log, require_no_log, require_own_log

HEADER = LogHeader(
    arm="nccl_pad",
    world_size=2,
    seed=7,
    global_batch_size=4,
    data={"source": "stdlib", "digest": "abc"},
    config={"lr": 1e-3, "comm_backend": "nccl_pad"},
    machine={"cpu": "Example"},
)


def step(index: int, ms: float = 100.0, loss: float | None = 2.0, tokens: int = 50, skipped: bool = False) -> StepRecord:
    norm = None if skipped else 1.0
    return StepRecord(
        step=index, loss=loss, grad_norm=norm, ms=ms, tokens=tokens, microbatches=[1, 2], waited_s=[0.01, 0.05], skipped=skipped
    )


def write(run: Path, header: LogHeader, steps: list[StepRecord]) -> Path:
    with StepLogWriter(run, header) as log:
        for record in steps:
            log.write(record)
    return run


def test_round_trip(tmp_path: Path) -> None:
    steps = [step(0), step(1, loss=None, skipped=True), replace(step(2), learning_rate=1e-4)]
    write(tmp_path / "run", HEADER, steps)
    for path in (tmp_path / "run", tmp_path / "run" / "steps.jsonl"):
        log = read_step_log(path)
        assert (log.header, log.steps, log.torn) == (HEADER, steps, False)


def test_each_step_is_on_disk_at_once(tmp_path: Path) -> None:
    with StepLogWriter(tmp_path, HEADER) as log:
        log.write(step(0))
        assert len(read_step_log(tmp_path).steps) == 1


def test_resume_cuts_the_steps_that_are_repeated(tmp_path: Path) -> None:
    write(tmp_path, HEADER, [step(0), step(1), step(2, ms=3.0)])
    with StepLogWriter(tmp_path, HEADER, 2, resumed=True) as log:
        assert log.dropped == 1
        log.write(step(2, ms=4.0))
    assert [record.ms for record in read_step_log(tmp_path).steps] == [100, 100, 4]
    with pytest.raises(DataError, match="the log has steps 0 to 2, and this run goes on at step 5"):
        StepLogWriter(tmp_path, HEADER, 5, resumed=True)
    with pytest.raises(DataError, match=r"seed: 7 in the log, 8 in this run.*PRIMUS_EXP_NAME"):
        StepLogWriter(tmp_path, replace(HEADER, seed=8), 2, resumed=True)
    # A run that died before its first checkpoint starts over.
    with StepLogWriter(tmp_path, HEADER, resumed=True) as log:
        assert log.dropped == 3


def saving(folder: Path, **changed: object) -> LogHeader:
    return replace(HEADER, config={"lr": 1e-3, "train_iters": 3, "save": str(folder), **changed})


def test_only_its_own_log_is_continued(tmp_path: Path) -> None:
    """Own is a log whose run saves where this one loads, or of the same configuration and not at its end."""
    own, run = tmp_path / "ckpt", tmp_path / "run"
    write(run, saving(own), [step(0), step(1), step(2)])
    unsaved = "its run saved no checkpoint in load, and it is another run's"
    before = (run / "steps.jsonl").read_bytes()
    for header, first_step, reason in (
        (saving(own, load=str(own)), 0, "it is the log of a run that has ended, with step 2"),
        (saving(own, load=str(own), lr=2e-3), 0, "load holds no checkpoint, and it is another run's: lr is 0.001 in the log, 0.002"),
        (saving(tmp_path / "b", load=str(tmp_path / "b")), 2, f"{unsaved}: load is not set in the log"),
        (saving(own, load=str(tmp_path / "c")), 2, f"{unsaved}: load is not set in the log"),
        (replace(saving(own, load=str(own)), arm="odc_pad"), 2, "arm: nccl_pad in the log, odc_pad in this run"),
    ):
        with pytest.raises(DataError, match=re.escape(reason) + r".*; choose another folder with PRIMUS_EXP_NAME or --exp_name"):
            StepLogWriter(run, header, first_step, resumed=True)
        with pytest.raises(DataError, match=re.escape(reason)):
            require_own_log(run, header.arm, header.config, first_step)
        assert (run / "steps.jsonl").read_bytes() == before
    elsewhere = saving(tmp_path / "b", load=f"{own}/../ckpt", lr=2e-3)
    require_own_log(run, elsewhere.arm, elsewhere.config, 2)
    with StepLogWriter(run, elsewhere, 2, resumed=True) as log:
        assert log.dropped == 1
        with pytest.raises(DataError, match="still going on"):
            require_own_log(run, elsewhere.arm, elsewhere.config, 2)
    # Killed before it saved in its new folder, and started again.
    with StepLogWriter(run, elsewhere, 2, resumed=True) as log:
        assert log.dropped == 0


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, HEADER, [step(0)])
    with pytest.raises(DataError, match=r"steps\.jsonl is the log of another run.*PRIMUS_EXP_NAME or --exp_name, continue it \(load\)"):
        StepLogWriter(tmp_path, HEADER)
    assert len(read_step_log(tmp_path).steps) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_ended_before_its_first_step_is_no_obstacle(tmp_path: Path, resumed: bool) -> None:
    write(tmp_path, replace(HEADER, seed=8), [])
    require_no_log(tmp_path)
    with StepLogWriter(tmp_path, HEADER, 3 * resumed, resumed=resumed) as log:
        with pytest.raises(DataError, match="still going on"):
            require_no_log(tmp_path)
        log.write(step(3 * resumed))
    assert read_step_log(tmp_path).header == replace(HEADER, first_step=3 * resumed)
    with pytest.raises(DataError, match="the log of another run"):
        require_no_log(tmp_path)


def test_a_running_run_is_not_written_over(tmp_path: Path) -> None:
    with StepLogWriter(tmp_path, HEADER) as log:
        log.write(step(0))
        for resumed in (False, True):
            with pytest.raises(DataError, match="is being written by a run that is still going on"):
                StepLogWriter(tmp_path, HEADER, resumed=resumed)
        log.write(step(1))
    assert len(read_step_log(tmp_path).steps) == 2
    with StepLogWriter(tmp_path, HEADER, 2, resumed=True) as log:
        with pytest.raises(DataError, match="still going on"):
            StepLogWriter(tmp_path, HEADER, 2, resumed=True)
        log.write(step(2))
    assert len(read_step_log(tmp_path).steps) == 3


def test_resume_in_another_folder_begins_at_that_step(tmp_path: Path) -> None:
    with StepLogWriter(tmp_path / "b", HEADER, 2, resumed=True) as log:
        log.write(step(2))
        log.write(step(3))
    log_read = read_step_log(tmp_path / "b")
    assert log_read.header == replace(HEADER, first_step=2) and [record.step for record in log_read.steps] == [2, 3]
    with StepLogWriter(tmp_path / "b", HEADER, 3, resumed=True) as log:
        log.write(step(3, ms=7))
    assert [(record.step, record.ms) for record in read_step_log(tmp_path / "b").steps] == [(2, 100), (3, 7)]
    with pytest.raises(DataError, match="the log has steps 2 to 3, and this run goes on at step 1"):
        StepLogWriter(tmp_path / "b", HEADER, 1, resumed=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"steps\.jsonl cannot be written: File exists"):
        StepLogWriter(tmp_path / "file", HEADER)


def test_logs_are_compared_over_the_steps_that_both_have(tmp_path: Path) -> None:
    """Steps 2 to 6 in A against 0 to 7 in B, of which 5 and 6 are measured: A takes 30 and 60 ms, B 10 and 20."""
    with StepLogWriter(tmp_path / "a", HEADER, 2, resumed=True) as log:
        for i, ms in enumerate([100, 100, 100, 30, 60], start=2):
            log.write(step(i, ms=ms, tokens=50 + i, loss=None if i == 4 else 2.0, skipped=i == 4))
    fast = [step(i, ms=[9, 9, 9, 9, 9, 10, 20, 9][i], tokens=50 + i, loss=None if i == 4 else 2.0, skipped=i == 4) for i in range(8)]
    write(tmp_path / "b", replace(HEADER, arm="odc_nopad"), fast)
    result = compare_logs(tmp_path / "a", tmp_path / "b")
    assert result["odc_nopad"].ms_per_step == [9, 9, 9, 10, 20] and result.speedup == {"odc_nopad": 3.0}
    assert result.arms[0].skipped_steps == [2] and result.steps == [3, 4]
    assert any("Compared are steps 2 to 6" in note for note in result.notes)


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, [step(0), step(1)]) / "steps.jsonl"
    path.write_text(path.read_text()[:-9])
    log = read_step_log(tmp_path)
    assert (len(log.steps), log.torn) == (1, True)


@pytest.mark.parametrize(
    ("line", "content", "message"),
    [
        (0, "{}", r"steps\.jsonl:1: arm: missing"),
        (2, "what", r"steps\.jsonl:3: not JSON"),
        (2, "[" * 100000, r"steps\.jsonl:3: not JSON"),
        (2, '{"step": "1"}', r"steps\.jsonl:3: step: expected a whole number"),
        (
            2,
            json.dumps({"step": 5, "loss": 1, "grad_norm": 1, "ms": 1, "tokens": 1, "microbatches": [1, 1], "waited_s": [0, 0]}),
            "expected step 1",
        ),
        (
            2,
            json.dumps({"step": 1, "loss": 1, "grad_norm": 1, "ms": 1, "tokens": 1, "microbatches": [1], "waited_s": [0, 0]}),
            "microbatches has 1 ranks",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: int, content: str, message: str) -> None:
    path = write(tmp_path, HEADER, [step(0), step(1)]) / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[line] = content
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=message):
        read_step_log(tmp_path)


def test_missing_and_empty_logs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_step_log(tmp_path)
    (tmp_path / "steps.jsonl").write_text("")
    with pytest.raises(DataError, match="no header"):
        read_step_log(tmp_path)


def test_comparison_by_hand(tmp_path: Path) -> None:
    """Two warm-up steps, then ratios 2, 2, 4; idle is what was waited, of 100 ms."""
    a = write(tmp_path / "a", HEADER, [step(i) for i in range(5)])
    fast = [step(i, ms=ms) for i, ms in enumerate([100, 100, 50, 50, 25, 25])]
    b = write(tmp_path / "b", replace(HEADER, arm="odc_nopad", config={"lr": 2e-3, "comm_backend": "odc_nopad"}), fast)
    result = compare_logs(a, b)
    assert result.speedup == {"odc_nopad": 2.0}
    assert result["nccl_pad"].idle_fraction == pytest.approx([0.1, 0.5])
    assert len(result["odc_nopad"].ms_per_step) == 5
    notes = " ".join(result.notes)
    assert "lr is 0.001 in A, 0.002 in B" in notes
    assert "comm_backend" not in notes
    assert "A has 5 steps and B 6" in notes


def test_two_runs_of_one_arm_get_letters(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, HEADER, [step(i) for i in range(4)]) for name in "ab")
    result = compare_logs(a, b)
    assert [arm.arm for arm in result.arms] == ["nccl_pad (A)", "nccl_pad (B)"]
    assert result.baseline == "nccl_pad (A)"


def test_every_reason_against_comparing_is_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a", HEADER, [step(i) for i in range(4)])
    other = replace(HEADER, seed=8, global_batch_size=8, data={"source": "stdlib", "digest": "def", "tokenizer": "byte"})
    b = write(tmp_path / "b", other, [step(i) for i in range(2)])
    with pytest.raises(DataError) as refusal:
        compare_logs(a, b)
    message = str(refusal.value)
    for reason in ("seed: 7 in A, 8 in B", "global batch size: 4", 'digest is "abc"', "tokenizer is not set in A", "only 2 common steps"):
        assert reason in message


def test_other_minibatches_are_noticed(tmp_path: Path) -> None:
    a = write(tmp_path / "a", HEADER, [step(i) for i in range(4)])
    b = write(tmp_path / "b", HEADER, [step(0), step(1), step(2, tokens=51), step(3)])
    with pytest.raises(DataError, match="step 2: 50 tokens in A, 51 tokens in B"):
        compare_logs(a, b)
