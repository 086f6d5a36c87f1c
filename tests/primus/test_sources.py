"""Which samples each rank gets in pretraining and in evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primus_odc.data import build_dataset
from primus_odc.errors import DataError
from primus_odc.planning import CostModel, Policy
from primus_odc.primus import pretrain, sft
from primus_odc.primus.evaluation import EvaluationCycle
from primus_odc.primus.pretrain import PretrainSource
from primus_odc.primus.sft import SftSource
from tests.megatron.run_cases import write_dialogues

LENGTH = 4


@pytest.mark.parametrize(("samples", "per_evaluation", "size", "ranks"), [(100, 12, 1, 3), (100, 24, 2, 3), (5, 12, 2, 2), (7, 6, 1, 1)])
def test_an_evaluation_sees_the_first_samples_once_on_some_rank_and_the_next_one_the_same(
    samples: int, per_evaluation: int, size: int, ranks: int
) -> None:
    cycles = [EvaluationCycle(list, samples, per_evaluation, size, rank, ranks) for rank in range(ranks)]
    evaluations = [[next(cycle) for _ in range(per_evaluation // (size * ranks)) for cycle in cycles] for _ in range(2)]
    assert evaluations[0] == evaluations[1]
    assert all(len(microbatch) == size for microbatch in evaluations[0])
    assert sorted(i for microbatch in evaluations[0] for i in microbatch) == sorted(i % samples for i in range(per_evaluation))


def test_an_evaluation_with_more_samples_than_there_are_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for samples, rank in ((12, 0), (5, 1)):
        EvaluationCycle(list, samples, 12, 1, rank, 2)
    assert caplog.text == ""
    EvaluationCycle(list, 5, 12, 1, 0, 2)
    assert "an evaluation has eval_iters x global_batch_size = 12 samples and there are 5 to validate on: some count more" in caplog.text


class _Dataset:
    unique_description_hash = "of the dataset"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((LENGTH,), index), "loss_mask": torch.ones(LENGTH)}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the source of every rank; the one that is asked decides whose turn it is."""
    turn = {"rank": 0, "ranks": 1}
    monkeypatch.setattr(pretrain.dist, "get_rank", lambda: turn["rank"])
    monkeypatch.setattr(pretrain.dist, "get_world_size", lambda: turn["ranks"])

    def step(ranks: int, policy: Policy, batch: int, cap: int, consumed: int, size: int = 100) -> tuple[list[Any], list[list[Any]]]:
        plans, microbatches = [], []
        for rank in range(ranks):
            turn.update(rank=rank, ranks=ranks)
            args = SimpleNamespace(global_batch_size=batch, seq_length=LENGTH, data_path=None, tokenizer_type="NullTokenizer")
            cost_model = CostModel.from_config("linear")
            source = PretrainSource(_Dataset(size), args, policy=policy, cost_model=cost_model, max_tokens=cap)
            plans.append(source.begin(3, consumed))
            microbatches.append(list(source))
        return plans, microbatches

    return step


@pytest.mark.parametrize("policy", ["lb_micro", "lb_mini"])
@pytest.mark.parametrize(("ranks", "batch", "cap"), [(2, 8, LENGTH), (2, 8, 2 * LENGTH), (3, 12, 3 * LENGTH), (3, 4, LENGTH)])
def test_every_sample_of_a_step_is_on_one_rank(sources: Any, policy: Policy, ranks: int, batch: int, cap: int) -> None:
    plans, microbatches = sources(ranks, policy, batch, cap, consumed=40)
    assert len({plan.digest for plan in plans}) == 1
    assert [len(own) for own in microbatches] == list(plans[0].counts)
    counted = [
        int(row[0]) for own in microbatches for m in own for row, mask in zip(m["tokens"], m["loss_mask"], strict=True) if mask.all()
    ]
    assert sorted(counted) == list(range(40, 40 + batch))
    padding = [m for own in microbatches for m in own if not m["loss_mask"].any()]
    assert len(padding) == (2 if policy == "lb_micro" and batch % ranks else 0)


def test_the_position_is_all_that_decides_and_the_dataset_begins_anew_at_its_end(sources: Any) -> None:
    plans, microbatches = sources(1, "lb_mini", 4, LENGTH, consumed=8, size=10)
    assert sorted(int(m["tokens"][0, 0]) for m in microbatches[0]) == [0, 1, 8, 9]
    assert plans[0].digest != sources(1, "lb_mini", 4, LENGTH, consumed=4, size=10)[0][0].digest


def test_no_step_has_more_samples_than_the_dataset(sources: Any) -> None:
    sources(1, "lb_mini", 4, LENGTH, consumed=0, size=4)
    with pytest.raises(DataError, match=r"global_batch_size: 4 is more than the 3 samples of the training dataset.* at most 3, or"):
        sources(1, "lb_mini", 4, LENGTH, consumed=0, size=3)


def test_no_step_of_fine_tuning_has_more_samples_than_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(sft.dist, "get_world_size", lambda: 1)
    params = {"sft_dataset_name": str(write_dialogues(tmp_path / "three.jsonl", 3)), "tokenizer_type": "byte"}
    dataset = build_dataset(params, workspace=tmp_path, max_tokens=200, over_length="error")

    def source(batch: int) -> SftSource:
        args = SimpleNamespace(global_batch_size=batch, seed=1, consumed_train_samples=0, iteration=0)
        planning: dict[str, Any] = {"policy": "lb_mini", "cost_model": CostModel.from_config("linear"), "max_tokens": 200}
        return SftSource(dataset, args, params, device=torch.device("cpu"), **planning)

    source(3).close()
    with pytest.raises(DataError, match="global_batch_size: 4 is more than the 3 samples to train on"):
        source(4)
