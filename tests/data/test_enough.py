"""Too few samples for a step: told before training, from no more of the data than that takes, exactly where training tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus_odc.data import build_dataset, build_stream
from primus_odc.data.enough import require_samples
from primus_odc.errors import ConfigError, DataError


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Q" * i, "response": "R" * (i % 7)}) + "\n" for i in range(1, 41)))
    return path


def keys(path: Path, **more: Any) -> dict[str, Any]:
    return {"sft_dataset_name": str(path), "tokenizer_type": "byte", **more}


@pytest.mark.parametrize(
    ("more", "samples"),
    [
        ({}, 40),
        ({"sft_max_samples": 12}, 12),
        ({"sft_min_tokens": 80}, None),
        ({"sft_validation_fraction": 0.3}, None),
        ({"sft_max_samples": 30, "sft_min_tokens": 70, "sft_validation_fraction": 0.5}, None),
    ],
)
def test_both_refuse_a_batch_that_is_larger_than_the_training_data(
    chat: Path, tmp_path: Path, more: dict[str, Any], samples: int | None
) -> None:
    params = keys(chat, **more)
    dataset = build_dataset(params, workspace=tmp_path, max_tokens=1000, over_length="error")
    count = len(dataset)
    assert count == samples or (samples is None and 1 < count < 40)
    require_samples(params, count, evaluates=False)
    assert sorted(build_stream(dataset, count, 1).next()) == list(range(count))
    told = f"global_batch_size: {count + 1} is more than the {count} samples to train on.*set it to at most {count}, or give more samples"
    with pytest.raises(DataError, match=told):
        require_samples(params, count + 1, evaluates=False)
    with pytest.raises(DataError, match=told):
        build_stream(dataset, count + 1, 1)


def test_a_part_without_any_sample_is_told_as_training_tells_it(chat: Path, tmp_path: Path) -> None:
    for more, split, evaluates in (
        ({"sft_min_tokens": 1000}, "train", False),
        ({"sft_validation_fraction": 1e-9}, "validation", True),
        ({"sft_max_samples": 1, "sft_validation_fraction": 1e-9}, "validation", True),
    ):
        params = keys(chat, **more)
        told = []
        with pytest.raises(DataError, match=f"the {split} part of .* is empty: ") as caught:
            build_dataset(params, split, workspace=tmp_path, max_tokens=1000, over_length="error")  # type: ignore[arg-type]
        told.append(str(caught.value))
        with pytest.raises(DataError) as caught:
            require_samples(params, 1, evaluates=evaluates)
        assert [*told, str(caught.value)] == told * 2
    require_samples(keys(chat, sft_validation_fraction=1e-9), 40, evaluates=False)


def test_no_more_is_read_than_a_step_needs(chat: Path) -> None:
    with chat.open("a") as file:
        file.write("no JSON\n")
    require_samples(keys(chat), 40, evaluates=False)
    with pytest.raises(DataError, match=r"chat\.jsonl:41 of .*: not a JSON line"):
        require_samples(keys(chat), 41, evaluates=False)
    with pytest.raises(DataError, match=r"chat\.jsonl:41 of .*: not a JSON line"):
        require_samples(keys(chat, sft_validation_fraction=1e-9), 5, evaluates=True)
    require_samples(keys(chat, sft_max_samples=40), 40, evaluates=False)


def test_names_of_the_hub_are_not_looked_up_and_wrong_keys_are_told() -> None:
    require_samples(keys(Path("owner/dataset")), 10**9, evaluates=True)
    with pytest.raises(ConfigError, match="tokenizer_type is missing"):
        require_samples({"sft_dataset_name": "stdlib"}, 1, evaluates=True)
