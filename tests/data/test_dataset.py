from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.data.dataset import TokenDataset
from primus_odc.errors import DataError
from tests.data.data_helpers import THREE, make_cache, make_sample


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    dataset = TokenDataset(make_cache(tmp_path))
    assert len(dataset) == 3 and dataset.ids == ("a", "b", "c") and dataset.truncated == 0
    assert dataset.lengths.tolist() == [3, 1, 5] and dataset.target_counts.tolist() == [2, 0, 2]
    for found, expected in zip(dataset, THREE, strict=True):
        assert found.sample_id == expected.sample_id
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.target_mask, expected.target_mask)
        assert type(found.tokens) is np.ndarray and not found.tokens.flags.writeable
    for index in (-1, 3):
        with pytest.raises(IndexError):
            dataset[index]


def test_rows_choose_and_order(tmp_path: Path) -> None:
    dataset = TokenDataset(make_cache(tmp_path), [2, 0])
    assert dataset.ids == ("c", "a") and dataset.lengths.tolist() == [5, 3] and dataset[1].tokens.tolist() == [5, 6, 7]
    with pytest.raises(DataError, match="without any sample"):
        TokenDataset(make_cache(tmp_path), [])


def test_truncation_keeps_the_first_tokens_and_counts(tmp_path: Path) -> None:
    dataset = TokenDataset(make_cache(tmp_path), truncate_at=3)
    assert dataset.truncated == 1 and dataset.lengths.tolist() == [3, 1, 3]
    assert dataset[2].tokens.tolist() == [1, 2, 3] and dataset.target_counts.tolist() == [2, 0, 0]
    assert "1 truncated, 2 without a target" in dataset.summary()
    dataset.require_at_most(3)
    with pytest.raises(DataError, match="cut to 0 tokens"):
        TokenDataset(make_cache(tmp_path), truncate_at=0)


def test_over_long_samples_are_refused_with_both_ways_out(tmp_path: Path) -> None:
    dataset = TokenDataset(make_cache(tmp_path))
    with pytest.raises(DataError) as error:
        dataset.require_at_most(2)
    for part in ("2 of 3 samples", "cap of 2 tokens", "'a' (3 tokens), 'c' (5 tokens)", "at least 5", "odc.over_length: truncate"):
        assert part in str(error.value)
    many = TokenDataset(make_cache(tmp_path, [make_sample(str(i), [1, 2], []) for i in range(9)]))
    with pytest.raises(DataError, match=r"9 of 9 .*'4' \(2 tokens\) and 4 more"):
        many.require_at_most(1)


def test_the_fingerprint_tells_apart(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    made = [TokenDataset(cache), TokenDataset(cache, [0, 1]), TokenDataset(cache, [1, 0]), TokenDataset(cache, truncate_at=3)]
    assert len({dataset.fingerprint for dataset in made}) == 4
    assert TokenDataset(make_cache(tmp_path / "elsewhere"), [0, 1, 2]).fingerprint == made[0].fingerprint


@settings(max_examples=20)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 13))
def test_tables_agree_with_the_samples(tmp_path_factory: pytest.TempPathFactory, masks: list[list[bool]], cap: int) -> None:
    samples = [make_sample(str(i), range(len(m)), [t for t, on in enumerate(m) if on and t]) for i, m in enumerate(masks)]
    dataset = TokenDataset(make_cache(tmp_path_factory.mktemp("cache"), samples), truncate_at=cap)
    assert dataset.truncated == sum(len(mask) > cap for mask in masks)
    for i, mask in enumerate(masks):
        assert dataset.lengths[i] == dataset[i].tokens.size == min(cap, len(mask))
        assert dataset.target_counts[i] == dataset[i].target_mask.sum() == sum(mask[1:cap])
