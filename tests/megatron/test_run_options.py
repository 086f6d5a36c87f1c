"""Everything wrong is told at once, each key once; earlier runs are not written over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_odc.errors import ConfigError
from primus_odc.experiment import load_experiment
from primus_odc.megatron.checkpoint import LATEST
from primus_odc.megatron.outputs import check_outputs
from primus_odc.megatron.planned import read_planned
from primus_odc.megatron.run_options import RunOptions
from primus_odc.megatron.train_config import normalise
from tests.megatron.run_cases import options, write_dialogues
from tests.report.test_logs import HEADER, step, write

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dialogues(tmp_path / "dialogues.jsonl")
    return tmp_path


def problems(folder: Path, **changed: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        options(folder, "odc_nopad", "run", **changed)
    return list(caught.value.problems)


def test_every_part_has_its_say_and_every_key_is_named_once(folder: Path) -> None:
    wrong = {
        "odc": {"timout_s": 3},
        "clip_grad": -1,
        "seed": -5,  # of loop and model
        "train_iters": "x",  # of loop and schedule
        "seq_length": None,  # of planner and model
        "tokenizer_type": "bite",
        "sft_dataset_name": "absent.jsonl",
        "sft_dataset_nmae": "x",  # of data and of no part at all
        "num_layers": 0,
        "lr_decay_style": "cosin",
        "distributed_backend": "nccl",
        "trani_iters": 4,
    }
    named = [problem.split()[0].rstrip(":") for problem in problems(folder, **wrong)]
    assert sorted(named) == sorted([*(set(wrong) - {"odc"}), "odc.timout_s"])


def test_presets_bring_keys_of_their_own(folder: Path) -> None:
    good = options(folder, "odc_nopad", "run")
    params = {**good.params, "some_key_of_primus": 1}
    RunOptions.of(replace(good.experiment, self_contained=False), params)
    with pytest.raises(ConfigError, match="some_key_of_primus"):
        RunOptions.of(good.experiment, params)


def test_another_framework_is_not_trained_as_megatron(folder: Path) -> None:
    good = options(folder, "odc_nopad", "run")
    with pytest.raises(ConfigError, match=r"framework is the text 'maxtext'; .* set megatron"):
        RunOptions.of(replace(good.experiment, framework="maxtext"), good.params)


def test_missing_packages_are_told_with_the_rest(folder: Path) -> None:
    said = problems(folder, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "absent"), train_iters=0)
    assert len(said) == 2 and any("absent" in problem for problem in said)


@pytest.mark.parametrize("cost_model", ["linear", "attention", [2.0, 3.0]])
def test_fixed_cost_reaches_the_planner(folder: Path, cost_model: Any) -> None:
    plain, fixed = (options(folder, "odc_nopad", "run", odc={"cost_model": cost_model, "microbatch_cost": cost}) for cost in (0, 700))
    assert plain.cost_model.fixed == 0
    assert fixed.cost_model.fixed == pytest.approx(700 * plain.cost_model.per_token)
    assert replace(fixed.cost_model, fixed=0.0) == plain.cost_model


@pytest.mark.parametrize("cost_model", ["linear", "attention", [2.0, 3.0]])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_plan_has_the_costs_and_the_cap_of_training(tmp_path: Path, cost_model: Any, recompute: str | None) -> None:
    """Also without the GPUs that training would need."""
    file = tmp_path / "mine.yaml"
    keys = {"sft_max_samples": 20, "sft_min_tokens": 0, "recompute_granularity": recompute, "distributed_backend": "nccl"}
    keys |= {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    odc = {"cost_model": cost_model, "microbatch_cost": 700}
    content = {"extends": str(CONFIGS / "smoke.yaml"), "workspace": str(tmp_path), "modules": {"post_trainer": keys | {"odc": odc}}}
    file.write_text(json.dumps(content))  # JSON is YAML
    planned = read_planned(file, [])
    experiment = load_experiment(file, ["--distributed_backend", "gloo", "--comm_backend", "odc_nopad"])
    trained = RunOptions.of(experiment, normalise(experiment.params))
    assert planned.cost_model == trained.cost_model and planned.cost_model.fixed > 0
    assert (planned.max_tokens, planned.global_batch_size) == (trained.max_tokens, trained.train.global_batch_size) == (256, 8)


def checkpoint(folder: Path, number: int) -> Path:
    """What there is of a checkpoint before torch is asked."""
    state = folder / f"iter_{number:07d}" / "trainer.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"format": 1, "step": number, "trained_steps": number, "scheduler": {}, "stream": {}, "parameters": {}}))
    (folder / LATEST).write_text(f"{number}\n")
    return folder


def test_outputs_of_an_earlier_run(folder: Path) -> None:
    saved, empty = checkpoint(folder / "saved", 3), str(folder / "empty")
    check_outputs(options(folder, "odc_nopad", "run", save=empty, load=empty))
    write(folder / "run", replace(HEADER, arm="odc_nopad", config={"save": str(saved)}), [step(0)])
    for keys, said in (
        ({}, ["log of another run"]),
        ({"load": empty, "save": empty + "2"}, ["holds no checkpoint"]),
        ({"load": empty, "save": empty}, ["load holds no checkpoint, and it is another run's: "]),
        ({"save": str(saved)}, ["log of another run", "holds the checkpoint of step 3"]),
        ({"load": str(saved), "ckpt_step": 2}, ["iter_0000002: no such checkpoint"]),
        ({"load": str(saved), "save": str(checkpoint(folder / "other", 1))}, ["holds the checkpoint of step 1"]),
        ({"load": str(folder / "other")}, ["its run saved no checkpoint in load, and it is another run's: "]),
    ):
        with pytest.raises(ConfigError) as caught:
            check_outputs(options(folder, "odc_nopad", "run", **keys))
        assert len(caught.value.problems) == len(said)
        assert all(part in problem for part, problem in zip(said, caught.value.problems, strict=True)), caught.value.problems
    check_outputs(options(folder, "odc_nopad", "run", load=str(saved), save=str(saved)))
    # In another arm only into another folder.
    with pytest.raises(ConfigError, match="arm: odc_nopad in the log, nccl_pad in this run; choose another folder"):
        check_outputs(options(folder, "nccl_pad", "run", load=str(saved), save=str(saved)))
    check_outputs(options(folder, "nccl_pad", "second", load=str(saved), save=str(saved)))


def test_a_run_killed_before_its_first_checkpoint_starts_again(folder: Path) -> None:
    empty = {"load": str(folder / "empty"), "save": str(folder / "empty")}
    killed = options(folder, "odc_nopad", "run", save=empty["save"], save_interval=5, lr=1e-2)
    write(folder / "run", replace(HEADER, arm="odc_nopad", config=killed.params), [step(number) for number in range(8)])
    check_outputs(options(folder, "odc_nopad", "run", lr=1e-2, save_interval=2, **empty))
    with pytest.raises(ConfigError, match=r"another run's: lr is 0.01 in the log, 0.02 in this run; choose another folder"):
        check_outputs(options(folder, "odc_nopad", "run", lr=2e-2, save_interval=2, **empty))
    with pytest.raises(ConfigError, match="arm: odc_nopad in the log, nccl_pad in this run; choose another folder"):
        check_outputs(options(folder, "nccl_pad", "run", lr=1e-2, **empty))


def test_learned_positions_reach_as_far_as_a_sample(folder: Path) -> None:
    learned = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 100}
    (problem,) = problems(folder, **learned)
    assert problem.startswith("max_position_embeddings: 100 learned positions are fewer than the 128 tokens a sample may have")
    options(folder, "odc_nopad", "run", **{**learned, "max_position_embeddings": 128})
    options(folder, "odc_nopad", "run", **learned, odc={"max_tokens_per_microbatch": 100})
    # Rotary positions are computed.
    options(folder, "odc_nopad", "run", **{**learned, "position_embedding_type": "rope"})
