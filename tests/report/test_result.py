"""The records: statistics by hand, the round trip through JSON, and refusals that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus_odc.errors import DataError
from primus_odc.report.result import ArmResult, ComparisonResult
from tests.report.report_records import make_comparison


def arm(name: str, ms: list[float], loss: list[float | None], **more: Any) -> ArmResult:
    return ArmResult.measure(
        arm=name,
        ms_per_step=ms,
        loss=loss,
        grad_norm=[None if value is None else 1.0 for value in loss],
        tokens=[100] * len(ms),
        microbatches=[[1, 2]] * len(ms),
        busy_ms=[[value / 2, value] for value in ms],
        **{"warmup_steps": 1, **more},
    )


def test_statistics_by_hand() -> None:
    """Step 0 is warm-up. Ratios 2, 3, 1, 4 have the median 2.5 and the quartiles 1.75 and 3.25."""
    base = arm("nccl_pad", [900, 20, 30, 40, 80], [2.0, 2.0, 1.0, 1.0, 1.0])
    fast = arm("odc_nopad", [1, 10, 10, 40, 20], [2.0, 2.0, 1.0, 1.001, 1.0])
    result = ComparisonResult.build(arms=[fast, base], warmup_steps=1, machine={}, ideal_ms_per_step=[1, 5, 10, 10, 10])
    assert result.baseline == "nccl_pad"
    assert result.steps == [1, 2, 3, 4]
    assert result.speedup == {"odc_nopad": 2.5}
    assert result.spread == {"odc_nopad": [1.75, 3.25]}
    assert base.ms_per_step_median == 35
    assert base.ms_per_step_spread == [27.5, 50]
    assert base.tokens_per_s == pytest.approx(1e3 * (100 / 30 + 100 / 40) / 2)
    assert base.idle_fraction == [0.5, 0.0]
    assert result.ideal_ms == 10
    assert result.ideal_share["odc_nopad"] == 0.5
    assert result.agreement == {"odc_nopad": pytest.approx(1e-3)}
    assert result.ladder is None


def test_skipped_steps_are_left_out() -> None:
    base = arm("nccl_pad", [9, 10, 1, 30], [2.0, 2.0, None, 1.0], skipped_steps=[2])
    other = arm("odc_pad", [9, 5, 1, 10], [2.0, 2.0, None, 1.0], skipped_steps=[2])
    result = ComparisonResult.build(arms=[base, other], warmup_steps=1, machine={})
    assert result.speedup == {"odc_pad": 2.5}
    assert result.agreement == {"odc_pad": 0}


def test_first_arm_is_the_baseline_without_nccl_pad() -> None:
    arms = [arm("odc_pad", [1, 10], [1.0, 1.0]), arm("odc_nopad", [1, 5], [1.0, 1.0])]
    result = ComparisonResult.build(arms=arms, warmup_steps=1, machine={})
    assert (result.baseline, result.speedup) == ("odc_pad", {"odc_nopad": 2.0})


def test_ladder_takes_differences_step_by_step() -> None:
    """Made by hand from the steps; all differ from the differences of the medians."""
    ms = {"nccl_pad": [1, 100, 60, 80], "odc_pad": [1, 90, 70, 60], "odc_nopad": [1, 95, 40, 65]}
    arms = [arm(name, [float(value) for value in values], [1.0] * 4) for name, values in ms.items()]
    ladder = ComparisonResult.build(arms=arms, warmup_steps=1, machine={}, ideal_ms_per_step=[1, 20, 30, 50]).ladder
    assert ladder is not None and ladder.split is None and ladder.remaining is not None
    assert (ladder.nccl_pad_ms, ladder.odc_pad_ms, ladder.odc_nopad_ms, ladder.ideal_ms) == (80, 70, 65, 30)
    assert (ladder.communication.ms, ladder.communication.quartiles) == (10, [0, 15])
    assert (ladder.plan.ms, ladder.plan.quartiles) == (-5, [-5, 12.5])
    assert (ladder.saved.ms, ladder.saved.quartiles) == (15, [10, 17.5])
    assert (ladder.remaining.ms, ladder.remaining.quartiles) == (15, [12.5, 45])


def test_ladder_closes_within_a_step() -> None:
    result = make_comparison(steps=3, ranks=2)  # two of them are warm-up
    ladder = result.ladder
    assert ladder is not None and ladder.split is not None and ladder.remaining is not None and ladder.ideal_ms is not None
    split = ladder.split
    parts = split.waiting.ms + split.library.ms + split.plan.ms + split.plan_rest.ms + ladder.remaining.ms
    assert ladder.ideal_ms + parts == pytest.approx(ladder.nccl_pad_ms, rel=1e-12)
    assert split.waiting.ms + split.library.ms == pytest.approx(ladder.communication.ms)
    assert split.plan.ms + split.plan_rest.ms == pytest.approx(ladder.plan.ms)
    assert split.padded_source == "odc_pad"


def test_round_trip(tmp_path: Path) -> None:
    result = make_comparison(steps=5, ranks=2)
    result.write(tmp_path / "new" / "result.json")
    assert ComparisonResult.read(tmp_path / "new" / "result.json") == result
    value = json.loads((tmp_path / "new" / "result.json").read_text())
    assert {"arms", "speedup", "ideal_ms", "machine"} <= set(value)
    assert set(value["speedup"]) == {"odc_pad", "odc_nopad"}
    wanted = "arm ms_per_step ms_per_step_median loss grad_norm tokens_per_s microbatches idle_fraction"
    assert set(wanted.split()) <= set(value["arms"][0])


def test_no_ideal_is_null(tmp_path: Path) -> None:
    result = ComparisonResult.build(arms=[arm("odc_pad", [1, 2], [1.0, 1.0])], warmup_steps=1, machine={})
    result.write(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["ideal_ms"] is None
    assert ComparisonResult.read(tmp_path / "result.json") == result


def change(value: Any, path: list[str | int], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if new is ...:
        del value[path[-1]]
    else:
        value[path[-1]] = new


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (["arms", 1, "ms_per_step", 3], "fast", r"arms\[1\]\.ms_per_step\[3\]: expected a number, got a string"),
        (["arms", 0, "arm"], ..., r"arms\[0\]\.arm: missing"),
        (["arms", 0, "microbatches", 2, 1], 1.5, r"arms\[0\]\.microbatches\[2\]\[1\]: expected a whole number"),
        (["arms", 0, "loss", 1], True, r"arms\[0\]\.loss\[1\]: expected a number, got true/false"),
        (["arms", 0, "loss", 1], None, r"arms\[0\]: arm nccl_pad: loss\[1\] is null"),
        (["arms", 2, "loss"], [1.0], r"arms\[2\]: arm odc_nopad: loss has 1 steps, ms_per_step has 5"),
        (["arms", 2, "phases", "wait_ms"], [], r"phases\.wait_ms has 0 steps"),
        (["arms", 1, "arm"], "nccl_pad", "unique"),
        (["arms", 1, "grad_nrom"], [], r"arms\[1\]\.grad_nrom: unknown key; did you mean 'grad_norm'"),
        (["speedup", "odc_pad"], None, r"speedup\.odc_pad: expected a number, got null"),
        (["speedup"], [], "speedup: expected an object, got a list"),
        (["speedup", "odc"], 1.0, "odc"),
        (["timelines", 0, "spans", 0, "kind"], "nap", r"timelines\[0\]\.spans\[0\]\.kind: 'nap' is not one of 'forward'"),
        (["ideal_ms_per_step"], [1.0], "ideal_ms_per_step has 1 steps"),
        (["ladder", "split", "plan", "ms"], "x", r"ladder\.split\.plan\.ms: expected a number"),
        (["ladder", "saved", "quartiles"], [1.0], r"ladder\.saved: quartiles is not \[q1, q3\]"),
        (["format"], 99, "format 99"),
        (["baseline"], "stock", "stock"),
    ],
)
def test_schema_errors_name_the_path(tmp_path: Path, path: list[str | int], new: Any, message: str) -> None:
    file = tmp_path / "result.json"
    make_comparison(steps=5, ranks=2).write(file)
    value = json.loads(file.read_text())
    change(value, path, new)
    file.write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        ComparisonResult.read(file)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        ComparisonResult.read(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"arms": [')
    with pytest.raises(DataError, match=r"torn\.json: not JSON.*column"):
        ComparisonResult.read(tmp_path / "torn.json")
    (tmp_path / "nan.json").write_text('{"ideal_ms": NaN}')
    with pytest.raises(DataError):
        ComparisonResult.read(tmp_path / "nan.json")


def test_not_finite_is_not_written(tmp_path: Path) -> None:
    result = ComparisonResult.build(arms=[arm("odc_pad", [1, 2], [1.0, float("nan")])], warmup_steps=1, machine={})
    with pytest.raises(DataError, match="not finite"):
        result.write(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_arms_of_other_data_or_no_steps_are_refused() -> None:
    base = arm("nccl_pad", [1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.raises(DataError, match="has 2 steps"):
        ComparisonResult.build(arms=[base, arm("odc_pad", [1, 2], [1.0, 1.0])], warmup_steps=1, machine={})
    with pytest.raises(DataError, match="not the same data"):
        ComparisonResult.build(arms=[base, arm("odc_pad", [1, 2, 3], [1.0, None, 1.0], skipped_steps=[1])], warmup_steps=1, machine={})
    with pytest.raises(DataError, match="no step left"):
        arm("odc_pad", [1], [1.0])
