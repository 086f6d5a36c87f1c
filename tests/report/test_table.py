"""The terminal's table: width, alignment, and plain words for wins and losses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primus_odc.report.ladder import Part
from primus_odc.report.result import ArmResult, ComparisonResult
from primus_odc.report.table import WIDTH, cells, ladder_lines, render_table
from primus_odc.report.wording import loss_sentence, rungs, sentences
from tests.report.report_records import make_comparison


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return make_comparison(steps=8, extra_arms=True)


def test_fits_and_aligns(result: ComparisonResult) -> None:
    text = render_table(result)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line.split()[0] for line in lines[2:6]] == ["nccl_pad", "nccl_zero2", "odc_pad", "odc_nopad"]
    # Flush right: the headings of all columns but the first end where their values end.
    assert len({len(line) for line in lines[:1] + lines[2:6]}) == 1


def test_wide_numbers_still_fit(result: ComparisonResult) -> None:
    slow = [replace(arm, ms_per_step_median=98765.4, ms_per_step_spread=[91234.5, 99876.5], tokens_per_s=1234567.0) for arm in result.arms]
    assert max(map(len, render_table(replace(result, arms=slow)).splitlines()[:7])) <= WIDTH


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0, None], "4.0000 at its only step."),
        ([4.0, 3.0, None, 2.0], "4.0000 at the first step, 3.0000 over all 3 steps (0.75 of it)."),
        ([4.0, *[2.0] * 5], "4.0000 at the first step, 2.0000 over the last 5 steps (0.50 of it)."),
    ],
)
def test_the_end_of_the_loss_is_named_after_its_steps(losses: list[float | None], said: str) -> None:
    steps = len(losses)
    arm = ArmResult.measure(
        arm="nccl_pad",
        ms_per_step=[1.0] * steps,
        loss=losses,
        grad_norm=losses,
        tokens=[1] * steps,
        microbatches=[[1]] * steps,
        busy_ms=[[1.0]] * steps,
        warmup_steps=0,
        skipped_steps=[step for step, loss in enumerate(losses) if loss is None],
    )
    assert said in loss_sentence(arm)


def test_what_is_left_out_is_counted(result: ComparisonResult) -> None:
    for warmup, said in ((0, "8 steps. "), (1, "7 steps; left out: the first step. "), (7, "1 step; left out: the first 7 steps. ")):
        last = sentences(replace(result, warmup_steps=warmup))[-1]
        assert last.startswith(f"Measured over {said.strip()}") and ("So few do not tell" in last) == (warmup == 7)


def test_cells_by_hand(result: ComparisonResult) -> None:
    arm = replace(result["odc_nopad"], ms_per_step_median=12.34, ms_per_step_spread=[11.0, 13.0], idle_fraction=[0.101, 0.2, 0.15, 0.3])
    row = cells(replace(result, speedup={**result.speedup, "odc_nopad": 1.234}), arm)
    assert row[0] == "odc_nopad"
    assert row[1] == "12.3 [11.0 13.0]"
    assert row[3] == "1.23x"
    assert row[5] == "10-30 %"


def test_a_speed_up_and_what_a_step_saves_cannot_contradict() -> None:
    """odc_nopad wins in most steps, and yet its median step is the longer one."""
    steps = {"nccl_pad": [40.0, 41.0, 100.0], "odc_pad": [40.0, 41.0, 100.0], "odc_nopad": [39.0, 70.0, 50.0]}
    arms = [
        ArmResult.measure(
            arm=name,
            ms_per_step=ms,
            loss=[1.0] * 3,
            grad_norm=[1.0] * 3,
            tokens=[1] * 3,
            microbatches=[[1]] * 3,
            busy_ms=[[1.0]] * 3,
            warmup_steps=0,
            microbatch_ms=[[[1.0]]] * 3,
        )
        for name, ms in steps.items()
    ]
    result = ComparisonResult.build(arms=arms, warmup_steps=0, machine={})
    assert arms[2].ms_per_step_median > arms[0].ms_per_step_median
    said = " ".join(sentences(result))
    assert "odc_nopad is 1.03 times as fast as nccl_pad" in said
    assert "From nccl_pad to odc_nopad a step saves 1.0 ms (saved in the middle half of the steps: -14.0 to +25.5)" in said
    assert "+1.0 [-14.0 +25.5] ms other effects of the plan" in said


def test_what_the_figures_are_is_said_beside_them(result: ComparisonResult) -> None:
    text = " ".join(render_table(result).split())
    assert "speed-up, of ideal: the ratio in every step, then the median" in text
    assert "ladder, ms per step. Arms: median of the steps. Between them: the difference in every step, then the median" in text


def test_losses_are_as_plain_as_wins(result: ComparisonResult) -> None:
    said = " ".join(sentences(replace(result, speedup={**result.speedup, "odc_nopad": 0.8})))
    assert "odc_nopad is SLOWER than nccl_pad: its steps take 1.25 times as long" in said
    assert "takes as long as" in " ".join(sentences(replace(result, speedup={**result.speedup, "odc_pad": 1.004})))
    assert "1.50 times as fast" in " ".join(sentences(replace(result, speedup={**result.speedup, "odc_pad": 1.5})))
    assert "exactly" in " ".join(sentences(replace(result, agreement=dict.fromkeys(result.agreement, 0.0))))
    assert "Losses DIFFER: odc_pad" in " ".join(sentences(replace(result, agreement={**result.agreement, "odc_pad": 0.1})))


def test_time_added_has_a_plus(result: ComparisonResult) -> None:
    assert result.ladder is not None and result.ladder.split is not None
    ladder = replace(result.ladder, split=replace(result.ladder.split, library=Part.of([-20.0, -12.5, -10.0])))
    worse = replace(result, ladder=ladder)
    assert any("collective library" in line and "+12.5 [+11.2 +16.2]" in line and "FASTER" in line for line in ladder_lines(worse))
    assert "-12.5 [-16.2 -11.2] ms only gloo being faster than on-demand transfers" in " ".join(sentences(worse))


def test_without_split_or_ladder(result: ComparisonResult) -> None:
    assert result.ladder is not None
    unsplit = replace(result, ladder=replace(result.ladder, split=None))
    assert [rung.name for rung in rungs(unsplit)] == ["nccl_pad", "communication", "odc_pad", "plan", "odc_nopad", "remaining", "ideal"]
    assert "not known" in " ".join(sentences(unsplit))
    assert "ladder" not in render_table(replace(result, ladder=None))
