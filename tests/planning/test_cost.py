"""Cost models against formulas written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from primus_odc.bench.shapes import SHAPES
from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel


def test_linear_counts_tokens() -> None:
    model = CostModel.from_config("linear", microbatch_cost=100)
    assert model.sample_costs([1, 5, 32000]).tolist() == [1, 5, 32000]
    assert model.microbatch_cost([3, 4]) == 107
    assert model.microbatch_cost([]) == 101, "an empty bucket is one padding token"


@pytest.mark.parametrize(
    ("spec", "fit"), [("attention", (1.982122, 2.611821)), ([4.348357, 8.768377], (4.348357, 8.768377)), ([0.5, 2], (0.5, 2.0))]
)
def test_fits(spec: str | list[float], fit: tuple[float, float]) -> None:
    lengths = np.array([1, 1000, 16000, 32000, 64000])
    s = lengths / 32000
    expected = fit[0] * s**2 + fit[1] * s
    np.testing.assert_allclose(CostModel.from_config(spec).sample_costs(lengths), expected, rtol=1e-14)


def test_attention_does_not_cross_samples() -> None:
    model = replace(CostModel.from_config("attention"), fixed=0.25)
    assert model.microbatch_cost([16000, 16000]) == pytest.approx(0.25 + 2 * (1.982122 / 4 + 2.611821 / 2))


def naive_flops(length: int, layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> int:
    """Forward and backward multiply-adds of every matrix product, one at a time."""
    head = hidden // heads
    products = []
    for _ in range(layers):
        products += [(length, hidden, heads * head), (length, hidden, groups * head), (length, hidden, groups * head)]
        products += [(length, heads * head, hidden)]
        products += [(length, hidden, ffn), (length, hidden, ffn), (length, ffn, hidden)]
    products.append((length, hidden, vocab))
    causal = sum(2 * layers * heads * head * (2 * position) for position in range(length)) + 2 * layers * heads * head * length
    return 3 * (sum(2 * m * k * n for m, k, n in products) + causal)


def test_model_shape_counts_flops() -> None:
    model = CostModel.from_model_shape(
        num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=2, vocab_size=500
    )
    for length in (1, 17, 400):
        assert model.microbatch_cost([length]) == naive_flops(length, 3, 64, 160, 8, 2, 500)


def small_model(**changed: Any) -> CostModel:
    shape: dict[str, Any] = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "vocab_size": 0}
    return CostModel.from_model_shape(num_layers=2, **shape, **changed)


def test_recompute_adds_a_forward_of_the_layers() -> None:
    once, again = (small_model(recompute=recompute) for recompute in (False, True))
    assert again.microbatch_cost([50]) / once.microbatch_cost([50]) == pytest.approx(4 / 3)


def test_fixed_cost_is_that_of_so_many_tokens_outside_attention() -> None:
    pairs = [
        (CostModel.from_config("linear", microbatch_cost=500), 500),
        (CostModel.from_config((7.0, 2.0), microbatch_cost=16000), 2.0 * 0.5),
        (CostModel.from_config("attention", microbatch_cost=16000), 2.611821 * 0.5),
        # 500 tokens through two layers of 32 * (2 * 32 + 2 * 32 + 3 * 64) weights: 2 FLOPs each, forward and twice that backward
        (small_model(microbatch_cost=500), 500 * 2 * 32 * 320 * 2 * 3),
    ]
    for model, expected in pairs:
        assert model.fixed == pytest.approx(expected, rel=1e-12)
        assert model.fixed_tokens in (500, pytest.approx(16000))
        assert model.microbatch_cost([40, 3]) == pytest.approx(expected + model.sample_costs([40, 3]).sum(), rel=1e-12)


def test_fixed_cost_in_tokens_that_cost_nothing() -> None:
    with pytest.raises(PlanError, match="b, the cost of a token, is 0"):
        CostModel.from_config((1.0, 0.0), microbatch_cost=5)


@pytest.mark.parametrize("spec", ["lineer", (1.0,), (1.0, 2.0, 3.0), (-1.0, 2.0), (float("nan"), 1.0), (0.0, 0.0)])
def test_wrong_models_are_refused(spec: str | list[float]) -> None:
    with pytest.raises(PlanError):
        CostModel.from_config(spec)


@pytest.mark.parametrize("tokens", ["-1", "nan", "inf"])
def test_a_wrong_fixed_cost_is_told_as_it_was_given(tokens: str) -> None:
    told = rf"--microbatch-cost, --fixed-tokens\) is {tokens} tokens"
    for spec in ("linear", "attention", (7.0, 2.0)):
        with pytest.raises(PlanError, match=told):
            CostModel.from_config(spec, microbatch_cost=float(tokens))
    with pytest.raises(PlanError, match=told):
        small_model(microbatch_cost=float(tokens))
    with pytest.raises(PlanError, match=told):
        SHAPES["tiny"].cost_model(float(tokens))
