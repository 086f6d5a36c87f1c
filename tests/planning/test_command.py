"""``primus-odc plan``: its numbers recomputed from the plans, its text, and its refusals."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primus_odc.config import parse_odc
from primus_odc.errors import ConfigError, DataError, PlanError
from primus_odc.planning import CostModel, plan_minibatch
from primus_odc.planning.command import add_plan_arguments, run_plan

CONFIGS = Path(__file__).parents[2] / "configs"
ARMS = ["nccl_pad", "nccl_localsort", "nccl_zero2", "odc_pad", "odc_nopad"]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_plan_arguments(parser)
    args, overrides = parser.parse_known_args(words)
    args.overrides = overrides
    return run_plan(args)


def test_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One minibatch that is the whole file: the order does not matter, so every number can be recomputed."""
    lengths = np.random.default_rng(3).integers(1, 100, 32).tolist()
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, lengths)))
    words = [str(tmp_path / "lengths.txt"), "--ranks", "4", "--samples-per-rank", "8", "--max-tokens", "120", "--cost-model", "linear"]
    assert run(*words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (point,) = report["points"]
    assert (point["ranks"], point["samples_per_rank"], point["minibatches"]) == (4, 8, 1)
    arms = {arm["arm"]: arm for arm in point["arms"]}
    assert list(arms) == ARMS
    order = np.random.default_rng(0).permutation(32)
    linear = CostModel.from_config("linear")
    micro = plan_minibatch("lb_micro", [lengths[i] for i in order], 4, 120, linear)
    mini = plan_minibatch("lb_mini", [lengths[i] for i in order], 4, 120, linear)
    pad = sum(max(rank[i] for rank in micro.microbatch_costs(linear)) for i in range(micro.counts[0]))
    assert arms["nccl_pad"]["step_cost"] == [pytest.approx(pad)]
    assert arms["odc_nopad"]["step_cost"] == [pytest.approx(mini.rank_costs(linear).max())]
    assert arms["odc_nopad"]["microbatches"] == [list(mini.counts)]
    assert arms["odc_nopad"]["speedup_over"]["nccl_pad"] == pytest.approx(pad / mini.rank_costs(linear).max())
    assert arms["nccl_localsort"]["speedup_over"]["nccl_localsort"] == 1
    np.testing.assert_allclose(arms["nccl_pad"]["idle_fraction"], 1 - micro.rank_costs(linear) / pad, atol=1e-12)

    assert run(*words) == 0
    text = capsys.readouterr().out
    for arm in ARMS:
        row = next(line.split() for line in text.splitlines() if line.startswith(f"  {arm} "))
        assert row[-2:] == [f"{arms[arm]['speedup_over'][over]:.3f}" for over in ("nccl_pad", "nccl_localsort")]
    assert all(f"\n{arm:<14}  " in text for arm in ARMS) and "6 bytes a parameter more" in " ".join(text.split())
    said = " ".join(text.split())
    assert "cost model linear (--cost-model)" in said and f"odc.cost_model instead (default: {parse_odc({}).odc.cost_model})" in said
    assert "\n4 ranks, 8 samples per rank, 1 minibatch\n" in text
    assert run(words[0], "--ranks", "1", "--samples-per-rank", "1", "--minibatches", "2") == 0
    assert "\n1 rank, 1 sample per rank, 2 minibatches\n" in capsys.readouterr().out
    assert "microbatches per rank" in text and "idle per rank" in text


def test_help_tells_the_cost_model_of_training() -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    told = " ".join(parser.format_help().split())
    assert f"(default: attention, or the YAML's; training plans with odc.cost_model, by default {parse_odc({}).odc.cost_model})" in told


def test_every_combination_of_a_named_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("longalign-like/64", "--ranks", "2", "8", "--samples-per-rank", "1", "4", "--minibatches", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["samples"] == 8 * 4 * 3 and report["max_tokens_per_microbatch"] == 1024
    assert [(p["ranks"], p["samples_per_rank"]) for p in report["points"]] == [(2, 1), (2, 4), (8, 1), (8, 4)]
    assert all(len(p["arms"][0]["step_cost"]) == p["minibatches"] for p in report["points"])
    assert report["points"][0]["arms"][4]["speedup_over"]["nccl_pad"] == pytest.approx(1), "one sample per rank: nothing to gain"
    assert report["points"][3]["arms"][4]["speedup_over"]["nccl_pad"] > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples-per-rank", "1"], "nccl_zero2 waits no longer than odc_nopad here"),
        (["--samples-per-rank", "4"], "nccl_zero2 loses to nccl_pad: "),
        (
            ["--samples-per-rank", "16", "--microbatch-cost", "20000"],
            "nccl_zero2 wins over nccl_pad, whose ranks meet in every microbatch, ",
        ),
    ],
)
def test_why_zero2_wins_or_loses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["longalign-like", "--minibatches", "2", *words]
    run(*words)
    text = " ".join(capsys.readouterr().out.split())
    assert said in text, text
    run(*words, "--json")
    (point,) = json.loads(capsys.readouterr().out)["points"]
    costs = {arm["arm"]: sum(arm["step_cost"]) for arm in point["arms"]}
    waits = 1 - costs["odc_nopad"] / costs["nccl_zero2"]
    assert (waits < 0.01) == ("waits no longer" in said) and (waits < 0.01 or f"{100 * waits:.0f} % of its step is waiting" in text)
    assert (costs["nccl_zero2"] > 1.01 * costs["nccl_pad"]) == ("loses to nccl_pad" in said)


def test_balanced_lengths_are_called_balanced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "equal.txt").write_text("64 " * 16)
    run(str(tmp_path / "equal.txt"), "--ranks", "4", "--samples-per-rank", "4", "--max-tokens", "128", "--microbatch-cost", "8")
    assert "collectives would do as well" in capsys.readouterr().out


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10 20 30 40")
    path = str(tmp_path / "lengths.txt")
    with pytest.raises(PlanError, match="samples have up to 40 tokens"):
        run(path, "--ranks", "2", "--samples-per-rank", "2", "--max-tokens", "35")
    with pytest.raises(PlanError, match="4 ranks, 2 samples per rank: 8 are needed, but there are 4"):
        run(path, "--ranks", "4", "--samples-per-rank", "2")
    for model in ("quadratic", "1,x", "1,2,3"):
        with pytest.raises(PlanError, match="use linear, attention or two coefficients"):
            run(path, "--ranks", "1", "--samples-per-rank", "1", "--cost-model", model)
    with pytest.raises(SystemExit):
        run(path, "--ranks", "0")
    with pytest.raises(PlanError, match="plan does not know --rank 4; keys are overridden after a YAML"):
        run(path, "--rank", "4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["longalign-like", "--seed", "-1"], "'-1' is not a whole number of at least 0"),
        (["longalign-like", "--minibatches", "1" + "0" * 14], "at most 100000000 are drawn: give fewer of --minibatches"),
        (["longalign-like/65537"], "longalign-like/65537: the longest sample of longalign-like has 65536 tokens"),
        (["longalign-like/1" + "0" * 30], "no divisor can be above that"),
        (["longalign-like", "--cost-model", "1e308,1e308"], "per_token is 3.125e+303; it must be a number from 0 to 1e+200"),
        (["longalign-like", "--cost-model", "1,1", "--microbatch-cost", "1e308"], "is 1e+308 tokens; it must be a number from 0 to"),
    ],
)
def test_numbers_that_are_none(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((PlanError, SystemExit)) as caught:
        run(*words, "--ranks", "2", "--samples-per-rank", "1")
    assert said in (str(caught.value) if isinstance(caught.value, PlanError) else capsys.readouterr().err)


def test_the_smallest_lengths_of_a_distribution_are_planned() -> None:
    assert run("longalign-like/65536", "--ranks", "2", "--samples-per-rank", "1", "--microbatch-cost", str(2**40)) == 0


def write_experiment(folder: Path, lengths: Sequence[int], **odc: object) -> str:
    """An experiment of documents of so many tokens: bytes between one that begins and one that ends a document."""
    lines = [json.dumps({"text": "x" * (length - 2)}) for length in lengths]
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    keys: dict[str, object] = {"sft_dataset_name": str(folder / "documents.jsonl"), "sft_conversation_format": "text"}
    keys |= {"sft_validation_fraction": 0.0, "eval_iters": 0, "sft_min_tokens": 30, "seq_length": 100, "global_batch_size": 9}
    content = {"extends": str(CONFIGS / "smoke.yaml"), "workspace": str(folder / "output")}
    (folder / "mine.yaml").write_text(json.dumps(content | {"modules": {"post_trainer": keys | {"odc": odc}}}))  # JSON is YAML
    return str(folder / "mine.yaml")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    for point in report["points"]:
        del point["planning_ms_median"]
    return report


def test_an_experiment_is_planned_as_it_would_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(5).integers(2, 200, 60).tolist()
    experiment = write_experiment(tmp_path, lengths, cost_model=[3.0, 2.0], microbatch_cost=7.0)
    trained = [min(length, 100) for length in lengths if length >= 30]  # sft_min_tokens; smoke.yaml has over_length: truncate
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, trained)))
    by_hand = [str(tmp_path / "lengths.txt"), "--ranks", "3", "--max-tokens", "100", "--cost-model", "3,2", "--microbatch-cost", "7"]
    told, expected = planned(capsys, experiment, "--ranks", "3", "4"), planned(capsys, *by_hand, "--samples-per-rank", "3")
    assert told["samples"] == len(trained) and told["points"][0] == expected["points"][0]
    assert told["microbatch_cost"] == 7 and told["cost_model_source"] == "odc.cost_model"
    # Batch sizes of training need not divide by the ranks.
    uneven = told["points"][1]
    assert (uneven["ranks"], uneven["samples_per_rank"], uneven["global_batch_size"]) == (4, 2.25, 9)
    assert all(sum(counts) <= 9 for counts in uneven["arms"][4]["microbatches"])
    assert (tmp_path / "output" / "token_cache").is_dir()

    run(experiment, "--ranks", "3", "4")
    text = capsys.readouterr().out
    assert "\n3 ranks, 3 samples per rank, " in text and "\n4 ranks, 9 samples a minibatch, " in text
    assert "(odc.cost_model)" in text and "instead" not in text


def test_options_change_what_the_experiment_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = write_experiment(tmp_path, [40, 60, 80, 100] * 4, cost_model=[3.0, 2.0], microbatch_cost=7.0)
    words = ["--ranks", "2", "--samples-per-rank", "2", "--max-tokens", "50", "--cost-model", "[1,2]", "--microbatch-cost", "3"]
    told = planned(capsys, experiment, *words)
    (tmp_path / "lengths.txt").write_text("40 50 50 50 " * 4)
    assert told["points"] == planned(capsys, str(tmp_path / "lengths.txt"), *words)["points"]
    assert (told["microbatch_cost"], told["max_tokens_per_microbatch"], told["cost_model_source"]) == (3, 50, "--cost-model")


def test_words_after_an_experiment_override_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--sft_min_tokens", "50", "--global_batch_size", "8", "--odc.microbatch_cost", "3", "--odc.cost_model", "[1, 2]"]
    told = planned(capsys, write_experiment(tmp_path, [40, 60, 80, 100] * 4), *changed, "--ranks", "2", "--cost-model", "3,2")
    (tmp_path / "lengths.txt").write_text("60 80 100 " * 4)
    words = ["--ranks", "2", "--samples-per-rank", "4", "--max-tokens", "100", "--cost-model", "3,2", "--microbatch-cost", "3"]
    assert told["points"] == planned(capsys, str(tmp_path / "lengths.txt"), *words)["points"]
    with pytest.raises(ConfigError, match="global_batch_siz"):
        run(write_experiment(tmp_path, [40, 60]), "--global_batch_siz", "8")


def test_an_experiment_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 3 samples are longer than the cap of 100 tokens"):
        run(write_experiment(tmp_path, [40, 60, 101], over_length="error"))
    with pytest.raises(ConfigError, match=r"odc\.cost_modl"):
        run(write_experiment(tmp_path, [40, 60], cost_modl="linear"))
    with pytest.raises(ConfigError, match="cost_model"):
        run(write_experiment(tmp_path, [40, 60]), "--cost-model", "quadratic")
    with pytest.raises(PlanError, match="2 ranks, 9 samples a minibatch: 9 are needed, but there are 2"):
        run(write_experiment(tmp_path, [40, 60]), "--ranks", "2")


def test_planning_does_not_import_torch() -> None:
    code = "import sys, primus_odc.planning.command, primus_odc.megatron.planned; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
