"""Step logs: writing, resuming, torn lines, and which two runs can be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from primus_odc.errors import DataError
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, compare_logs, read_step_log

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
    with StepLogWriter(tmp_path, HEADER, first_step=2) as log:
        log.write(step(2, ms=4.0))
    assert [record.ms for record in read_step_log(tmp_path).steps] == [100, 100, 4]
    with pytest.raises(DataError, match="3 steps before step 5"):
        StepLogWriter(tmp_path, HEADER, first_step=5)
    with pytest.raises(DataError, match="seed: 7 in the log, 8 in this run"):
        StepLogWriter(tmp_path, replace(HEADER, seed=8), first_step=2)


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
