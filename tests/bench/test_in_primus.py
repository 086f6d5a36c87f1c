"""What `bench primus` asks of Primus, and its table; Primus itself is run by tests/primus/test_real_primus.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_odc.bench.beside_bench import Point, render_beside
from primus_odc.bench.in_primus import InPrimus, plan_keys
from primus_odc.bench.job import arm_spec
from primus_odc.bench.lengths import draw_minibatches
from primus_odc.bench.shapes import SHAPES
from primus_odc.cli import main
from primus_odc.config import parse_odc
from primus_odc.data.build import build_dataset
from primus_odc.data.stream import MinibatchStream
from primus_odc.errors import DataError
from primus_odc.planning import CostModel
from primus_odc.report.log_header import LogHeader
from primus_odc.report.logs import StepLog, StepRecord

POINT = Point(
    shape="tiny",
    layers=None,
    lengths="longalign-like",
    device="cpu",
    world_size=2,
    samples_per_rank=2,
    cap=512,
    minibatches=3,
    seed=7,
    fixed_tokens=128.0,
)


def in_primus(folder: Path, *arms: str) -> InPrimus:
    specs = tuple(arm_spec(arm) for arm in arms)
    return InPrimus(primus=folder, megatron=folder, script=None, folder=folder, arms=specs, point=POINT, timeout_s=30.0)


def test_the_samples_come_in_the_minibatches_of_the_benchmark_twice(tmp_path: Path) -> None:
    job = in_primus(tmp_path, "odc_nopad")
    params = job.experiment(job.arms[0], job.write_samples())["modules"]["post_trainer"]["overrides"]
    dataset = build_dataset(params, workspace=tmp_path, max_tokens=params["seq_length"], over_length="error")
    stream = MinibatchStream(len(dataset), params["global_batch_size"], params["seed"])
    drawn = draw_minibatches("longalign-like", 4, 3, 512, 7, 2, SHAPES["tiny"].length_divisor)
    assert params["train_iters"] == 6 and params["train_iters"] * 4 == len(dataset)
    for lengths in (*drawn, *drawn):
        assert [dataset[i].tokens.size for i in stream.next()] == lengths
    assert all(dataset[i].target_mask.sum() == dataset[i].tokens.size - 1 for i in range(len(dataset)))


@pytest.mark.parametrize("shape", ["tiny", "qwen2-1.5b"])
def test_the_plan_has_the_costs_of_the_benchmark(shape: str) -> None:
    costs = SHAPES[shape].cost_model(128.0)
    keys = plan_keys(costs)
    ours = CostModel.from_config(keys["cost_model"], microbatch_cost=keys["microbatch_cost"])
    unit = ours.per_token / costs.per_token
    assert ours.per_token_squared == pytest.approx(costs.per_token_squared * unit, rel=1e-12)
    assert ours.fixed == pytest.approx(costs.fixed * unit, rel=1e-12)


def test_every_arm_is_an_experiment_of_its_own(tmp_path: Path) -> None:
    job = in_primus(tmp_path, "nccl_pad", "odc_nopad", "odc_nopad:resident")
    experiments = [job.experiment(arm, tmp_path / "samples.jsonl") for arm in job.arms]
    assert len({experiment["exp_name"] for experiment in experiments}) == 3
    for experiment, arm in zip(experiments, ("nccl_pad", "odc_nopad", "odc_nopad"), strict=True):
        (preset,) = experiment["extends"]
        assert yaml.safe_load(Path(preset).read_text())["modules"]["post_trainer"]["overrides"]["comm_backend"] == arm
        parse_odc({"comm_backend": arm, "odc": experiment["modules"]["post_trainer"]["overrides"]["odc"]})
    assert experiments[2]["modules"]["post_trainer"]["overrides"]["odc"]["parameters"] == "resident"


def step_log(arm: str, ms: list[float]) -> StepLog:
    header = LogHeader(arm=arm, world_size=2, seed=1, global_batch_size=4, data={}, config={}, machine={}, versions={})
    steps = [
        StepRecord(step=i, loss=2.0, grad_norm=1.0, ms=value, tokens=30, microbatches=[1, 2], waited_s=[0.0, 0.0])
        for i, value in enumerate(ms)
    ]
    return StepLog(header=header, steps=steps)


def bench_file(path: Path, tokens: int = 30, **ms: list[float]) -> Path:
    """A result file with these times of every minibatch."""

    def steps(times: list[float]) -> list[dict[str, Any]]:
        ranks = [[[5], [tokens - 15]], [[10]]]
        return [{"minibatch": i, "microbatches": ranks, "ranks": [{"ms": 1.0}, {"ms": value}]} for i, value in enumerate(times)]

    entry = {name: getattr(POINT, name) for name in Point.__slots__}
    entry |= {"kind": "train", "steps": {arm: steps(times) for arm, times in ms.items()}}
    path.write_text(json.dumps({"format": 1, "runs": [{"commit": "c", "machine": {}, "versions": {}, "entries": [entry]}]}))
    return path


def test_only_the_second_pass_counts_and_speed_ups_are_compared_minibatch_by_minibatch(tmp_path: Path) -> None:
    logs = {
        "nccl_pad": step_log("nccl_pad", [9e9] * 3 + [100.0, 200.0, 300.0]),
        "odc_nopad": step_log("odc_nopad", [9e9] * 3 + [50, 160, 250]),
    }
    file = bench_file(tmp_path / "b.json", nccl_pad=[80.0, 190.0, 290.0], odc_nopad=[40.0, 152.0, 290.0])
    text = render_beside(logs, POINT, file)
    assert "| odc_nopad | 160.0 | 1.250 [1.200..2.000] | 0.0e+00 | 0.0e+00 | 152.0 | 1.250 [1.000..2.000] | 1.000 [1.000..1.200] |" in text
    assert "odc_nopad: within 3% of bench train's speed-up" in text
    assert "| 1 | 200 | 190 | 160 | 152 |" in text
    slower = bench_file(tmp_path / "c.json", nccl_pad=[80.0, 190.0, 290.0], odc_nopad=[40.0, 160.0, 290.0])
    assert "odc_nopad: not within 3% of bench train's speed-up (median over minibatches: 1.053)" in render_beside(logs, POINT, slower)


def test_other_minibatches_are_not_compared(tmp_path: Path) -> None:
    file = bench_file(tmp_path / "b.json", tokens=31, nccl_pad=[80.0, 190.0, 290.0])
    with pytest.raises(DataError, match=r"nccl_pad, minibatch 0: 30 tokens in \[1, 2\] microbatches in Primus, 31 in"):
        render_beside({"nccl_pad": step_log("nccl_pad", [1.0] * 6)}, POINT, file)


def test_what_cannot_be_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = ["--primus", str(tmp_path), "--megatron", str(tmp_path), "--out", str(tmp_path / "full")]
    assert main(["bench", "primus", *words, "--arms", "ideal", "odc_pad", "odc_pad", "--shape", "tiny", "--cap", "100"]) == 2
    error = capsys.readouterr().err
    told = ("is no checkout of Primus", "is no checkout of Megatron-LM", "--arms ideal", "not an empty folder", "--cap: below 128 tokens")
    for part in (*told, "--arms: odc_pad stands there 2 times"):
        assert part in error


STUB = """
import sys
print("said by the run")
sys.exit(3)
"""


def test_an_arm_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("primus/cli/main.py", "megatron/training/training.py", "stub.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STUB)
    words = ["--primus", str(tmp_path), "--megatron", str(tmp_path), "--script", str(tmp_path / "stub.py"), "--device", "cpu"]
    words += ["--shape", "tiny", "--nproc", "1", "--minibatches", "1", "--arms", "nccl_pad", "--out", str(tmp_path / "out")]
    assert main(["bench", "primus", *words]) == 1
    error = capsys.readouterr().err
    assert "nccl_pad in Primus: exit status 1" in error and "said by the run" in (tmp_path / "out" / "nccl_pad.log").read_text()
