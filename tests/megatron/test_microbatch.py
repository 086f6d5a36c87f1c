from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from primus_odc.data.packing import pack_microbatch
from primus_odc.errors import DataError
from primus_odc.megatron.microbatch import Microbatch
from tests.megatron.gpt_cases import CPU, make_samples


def test_targets_are_the_tokens_after_the_positions_that_count() -> None:
    samples = make_samples((5, 1, 3))
    microbatch = Microbatch.of(pack_microbatch(samples), CPU)
    tokens = np.concatenate([sample.tokens for sample in samples])
    predicted = np.flatnonzero(np.concatenate([sample.target_mask for sample in samples]))
    assert microbatch.target_index.tolist() == (predicted - 1).tolist()
    assert microbatch.targets.tolist() == tokens[predicted].tolist()
    assert microbatch.num_targets == len(predicted)
    assert microbatch.tokens.tolist() == [tokens.tolist()]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2]]


def test_the_samples_are_described_on_the_host() -> None:
    packed = Microbatch.of(pack_microbatch(make_samples((5, 1, 3))), CPU).packed
    assert packed.lengths == (5, 1, 3)
    assert packed.qkv_format == "thd" and packed.max_seqlen_q == packed.max_seqlen_kv == 5
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 5, 6, 9]


@pytest.mark.parametrize("borders", [[0], [1, 9], [0, 8], [0, 4, 4, 9], [0, 6, 5, 9]])
def test_borders_must_divide_the_tokens(borders: list[int]) -> None:
    arrays = dataclasses.replace(pack_microbatch(make_samples((5, 1, 3))), cu_seqlens=np.array(borders, dtype=np.int32))
    with pytest.raises(DataError, match="does not divide 9 tokens"):
        Microbatch.of(arrays, CPU)
