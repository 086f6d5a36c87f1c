from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest

from primus_odc.report.agreement import disagreements
from primus_odc.report.command import add_compare_arguments, run_compare
from primus_odc.report.result import ComparisonResult
from tests.report.report_records import make_comparison


def with_loss(result: ComparisonResult, arm: str, step: int, factor: float) -> ComparisonResult:
    """The result with one loss changed."""
    changed = result[arm]
    loss = [value * factor if number == step and value is not None else value for number, value in enumerate(changed.loss)]
    arms = [dataclasses.replace(item, loss=loss) if item is changed else item for item in result.arms]
    return dataclasses.replace(result, arms=arms)


def test_arm_step_and_amount_are_named() -> None:
    result = make_comparison(steps=6, ranks=2)
    assert disagreements(result) == []
    assert disagreements(with_loss(result, "odc_pad", 0, 1 + 5e-6)) == []
    (problem,) = disagreements(with_loss(result, "odc_nopad", 4, 1 + 4e-5))
    assert problem.startswith("odc_nopad does not agree with nccl_pad: at step 4")
    assert "4.0e-05" in problem and "1 steps" in problem
    wrong = with_loss(with_loss(result, "nccl_pad", 2, 1.1), "nccl_pad", 3, 1.2)
    assert [sentence.split()[0] for sentence in disagreements(wrong)] == ["odc_pad", "odc_nopad"]


def test_lower_precision_is_not_held_to_it() -> None:
    wrong = with_loss(make_comparison(steps=6, ranks=2), "odc_nopad", 4, 1.01)
    assert disagreements(dataclasses.replace(wrong, config={"bf16": True})) == []


def test_the_command_reports_first_and_then_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("primus_odc.megatron.compare")
    wrong = with_loss(make_comparison(steps=6, ranks=2), "odc_nopad", 4, 1.01)
    module.run_job = lambda *_, result, **__: wrong.write(result)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "primus_odc.megatron.compare", module)
    parser = argparse.ArgumentParser()
    add_compare_arguments(parser)
    args = parser.parse_args(["x.yaml", "--output", str(tmp_path)])
    args.overrides = []
    assert run_compare(args) == 1
    assert "odc_nopad does not agree with nccl_pad: at step 4" in capsys.readouterr().err
    assert (tmp_path / "result.json").exists() and (tmp_path / "index.html").exists()
