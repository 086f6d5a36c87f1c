from __future__ import annotations

from typing import Any

import pytest

from primus_odc.bench.agreement import require_agreement
from primus_odc.errors import VerificationError


def step(loss: float, norm: float) -> dict[str, Any]:
    return {"minibatch": 3, "target_tokens": 2, "ranks": [{"loss_sum": loss, "grad_norm": norm}, {"loss_sum": loss, "grad_norm": norm}]}


def test_rounding_is_allowed() -> None:
    require_agreement("1 sample", {"nccl_pad": [step(5.0, 1.0)], "odc_pad": [step(5.001, 1.004)]})


@pytest.mark.parametrize(
    "other, told",
    [(step(5.01, 1.0), "loss is 5.01 in odc_pad"), (step(5.0, 1.03), "norm is 1.03"), (step(float("nan"), 1.0), "loss is nan")],
)
def test_anything_else_is_refused_by_name(other: dict[str, Any], told: str) -> None:
    with pytest.raises(VerificationError, match=f"1 sample, minibatch 3: .*{told}"):
        require_agreement("1 sample", {"nccl_pad": [step(5.0, 1.0)], "odc_nopad": [step(5.0, 1.0)], "odc_pad": [other]})
