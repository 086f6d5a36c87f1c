from __future__ import annotations

import numpy as np
import pytest

from primus_odc.data.samples import Sample
from primus_odc.errors import DataError
from tests.data.data_helpers import make_sample


def test_first_token_is_never_a_target() -> None:
    with pytest.raises(DataError, match=r"'s1'.*first token"):
        make_sample("s1", [1, 2], [0])


@pytest.mark.parametrize(
    ("tokens", "mask", "reason"),
    [
        (np.zeros(0, np.int32), np.zeros(0, np.bool_), "T >= 1"),
        (np.zeros(3, np.int32), np.zeros(2, np.bool_), "one shape"),
        (np.zeros((1, 2), np.int32), np.zeros((1, 2), np.bool_), "one shape"),
        (np.zeros(2, np.int64), np.zeros(2, np.bool_), "int32"),
        (np.zeros(2, np.int32), np.zeros(2, np.float32), "bool"),
    ],
)
def test_wrong_arrays_are_refused(tokens: np.ndarray, mask: np.ndarray, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Sample(sample_id="s", tokens=tokens, target_mask=mask)
