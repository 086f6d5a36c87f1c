"""T3: 200 draws of who runs which samples, in which order and how many together, give one gradient.

Right: every parameter within 1e-6 of the same fp64 reference, whatever the draw: samples permuted, split between 2 or 3 ranks at random
(a rank may get none) and packed into microbatches of random size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import primus_odc
from tests.cases.gpt_ranks import MODES, TOLERANCE, make_samples, reference_gradients, run_minibatch, sharded_gpt, worst_error
from tests.megatron.gpt_cases import QWEN2
from tests.workers import run_workers

DRAWS = {2: 176, 3: 24}
LENGTHS = (6, 2, 11, 3, 1, 8)
PARAMS: dict[str, Any] = {**QWEN2, "hidden_size": 16, "ffn_hidden_size": 24}


def _draw(rng: np.random.Generator, world_size: int) -> list[list[list[int]]]:
    """A random partition of the samples: [rank][microbatch] -> samples."""
    order = rng.permutation(len(LENGTHS)).tolist()
    cuts = sorted(rng.integers(0, len(order) + 1, world_size - 1).tolist())
    assignment = []
    for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True):
        buckets: list[list[int]] = []
        for i in order[start:stop]:
            if not buckets or rng.random() < 0.5:
                buckets.append([])
            buckets[-1].append(i)
        assignment.append(buckets)
    return assignment


def _draws(rank: int, world_size: int) -> dict[str, float]:
    samples = make_samples(LENGTHS)
    model, weights = sharded_gpt(params=PARAMS)
    expected = reference_gradients(weights, samples, PARAMS)
    rng = np.random.default_rng(world_size)  # the same draws on every rank
    errors = {}
    for mode in MODES:
        engine = primus_odc.attach(model, **mode)
        for number in range(DRAWS[world_size] // len(MODES)):
            assignment = _draw(rng, world_size)
            run_minibatch(engine, model, samples, assignment[rank], announce=bool(number % 2))
            errors[f"draw {number} {assignment}, {mode}"] = worst_error(model, expected)
        engine.detach()
    return errors


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", DRAWS)
def test_every_draw_has_the_same_gradient(world_size: int) -> None:
    for errors in run_workers(_draws, world_size, timeout_s=100):
        assert len(errors) == DRAWS[world_size]
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}
