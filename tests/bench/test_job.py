from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from primus_odc.bench.job import Job, arm_spec
from primus_odc.bench.shapes import SHAPES
from primus_odc.errors import ConfigError

JOB = Job(
    kind="train",
    device="cpu",
    world_size=2,
    transport="host",
    timeout_s=60.0,
    out="r.json",
    commit=None,
    command="primus-odc bench",
    store="s",
    points=((1, 512),),
    arms=("nccl_pad", "odc_nopad:owner+resident", "ideal"),
)


@pytest.mark.parametrize(
    "name, policy, options",
    [
        ("nccl_pad", "lb_micro", None),
        ("nccl_localsort", "localsort", None),
        ("nccl_zero2", "lb_mini", None),
        ("ideal", "lb_mini", None),
        ("odc_pad", "lb_micro", {"accumulate": "local", "parameters": "reshard"}),
        ("odc_nopad", "lb_mini", {"accumulate": "local", "parameters": "reshard"}),
        ("odc_nopad:resident", "lb_mini", {"accumulate": "local", "parameters": "resident"}),
        ("odc_nopad:owner", "lb_mini", {"accumulate": "owner", "parameters": "reshard"}),
        ("odc_pad:resident+owner", "lb_micro", {"accumulate": "owner", "parameters": "resident"}),
    ],
)
def test_what_an_arm_means(name: str, policy: str, options: dict[str, str] | None) -> None:
    arm = arm_spec(name)
    assert arm.policy == policy
    assert (None if arm.options is None else dict(arm.options)) == options


@pytest.mark.parametrize("name", ["odc", "nccl_pad:owner", "ideal:owner", "odc_nopad:", "odc_nopad:owner+fast"])
def test_other_arms_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        arm_spec(name)


def test_a_job_reaches_the_ranks_as_it_is(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == JOB
    JOB.check()


def test_everything_wrong_is_told_at_once() -> None:
    wrong = replace(JOB, device="tpu", shape="gpt5", arms=["nccl_pad", "best"], optimizer="graph", share_model=True, lengths="short")
    with pytest.raises(ConfigError) as caught:
        wrong.check()
    assert len(caught.value.problems) == 6


def test_an_arm_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"1 problem(?s:.*)--arms: ideal stands there 2 times; name each once"):
        replace(JOB, arms=("ideal", "nccl_pad", "ideal")).check()


def test_the_shapes_have_the_published_sizes() -> None:
    def parameters(name: str) -> int:
        shape = SHAPES[name]
        p = shape.params
        head = p["hidden_size"] // p["num_attention_heads"]
        attention = (p["num_attention_heads"] + p["num_query_groups"]) * head * 2 * p["hidden_size"]
        biases = (p["num_attention_heads"] + 2 * p["num_query_groups"]) * head
        block = attention + biases + 3 * p["hidden_size"] * p["ffn_hidden_size"] + 2 * p["hidden_size"]
        return int(p["num_layers"] * block + 2 * shape.vocab_size * p["hidden_size"] + p["hidden_size"])

    # Qwen2-1.5B has 1,543,714,304 parameters with one table for embedding and head, Qwen2-7B 7,615,616,512 with two.
    assert parameters("qwen2-1.5b") == 1543714304 + 151936 * 1536
    assert parameters("qwen2-7b") == 7615616512


def test_the_fixed_cost_is_that_of_so_many_tokens() -> None:
    model = SHAPES["tiny"].cost_model(100.0)
    assert model.microbatch_cost([200]) - model.microbatch_cost([100]) == pytest.approx(
        100 * model.per_token + 30000 * model.per_token_squared
    )
    assert model.fixed == pytest.approx(100 * model.per_token)


def test_keys_of_the_engine_are_checked_before_a_rank_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(JOB, nic="mlx4", ranks_per_node=1).check()
    (problem,) = caught.value.problems
    assert "nic has no choice 'mlx4', did you mean 'mlx5'" in problem
