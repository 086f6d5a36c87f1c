from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.data.packing import pack_microbatch
from primus_odc.data.samples import Sample
from tests.data.data_helpers import THREE, make_sample


def test_three_samples_by_hand() -> None:
    packed = pack_microbatch(THREE)
    assert packed.tokens.tolist() == [5, 6, 7, 9, 1, 2, 3, 4, 8]
    assert packed.labels.tolist() == [6, 7, 0, 0, 2, 3, 4, 8, 0]
    assert packed.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 9]


def test_the_empty_bucket() -> None:
    packed = pack_microbatch([])
    assert packed.tokens.tolist() == packed.labels.tolist() == packed.position_ids.tolist() == [0]
    assert packed.loss_mask.tolist() == [0.0] and packed.cu_seqlens.tolist() == [0, 1]


def test_dtypes() -> None:
    for samples in ((), THREE):
        packed = pack_microbatch(samples)
        found = (packed.tokens.dtype, packed.labels.dtype, packed.loss_mask.dtype, packed.position_ids.dtype, packed.cu_seqlens.dtype)
        assert found == (np.int64, np.int64, np.float32, np.int64, np.int32)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=6))
    return [
        make_sample(str(i), [10 * i + t for t in range(len(m))], [t for t, on in enumerate(m) if on and t]) for i, m in enumerate(masks)
    ]


@settings(max_examples=100)
@given(sample_lists())
def test_every_target_is_a_label_of_its_own_sample_once(samples: list[Sample]) -> None:
    packed = pack_microbatch(samples)
    pairs = [(s.tokens[t - 1], s.tokens[t]) for s in samples for t in range(1, s.tokens.size) if s.target_mask[t]]
    counted = packed.loss_mask == 1.0
    assert list(zip(packed.tokens[counted], packed.labels[counted], strict=True)) == pairs
    assert packed.loss_mask.sum() == sum(int(s.target_mask.sum()) for s in samples)


@settings(max_examples=50)
@given(sample_lists())
def test_packing_together_is_packing_one_by_one(samples: list[Sample]) -> None:
    packed = pack_microbatch(samples)
    for sample, start, end in zip(samples, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        alone = pack_microbatch([sample])
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(getattr(packed, name)[start:end], getattr(alone, name))
