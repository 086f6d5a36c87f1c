"""T4: three steps whose global token counts differ tenfold take steps of one size.

Right: with a constant gradient (the same sample once, ten and a hundred times) the gradient norm is constant, although counts, ranks and
tokens of the three minibatches differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import primus_odc
from tests.cases.gpt_ranks import MODES, TOLERANCE, make_samples, reference_gradients, run_minibatch, sharded_gpt, worst_error
from tests.workers import run_workers

# [step][rank] -> sizes of the microbatches, in copies of the sample.
STEPS: list[list[list[int]]] = [[[1], []], [[3, 1], [4, 2]], [[40], [20, 1, 9, 30]]]


def _gpt_norms(rank: int, world_size: int, mode: dict[str, Any]) -> list[float]:
    sample = make_samples((5,))
    model, weights = sharded_gpt()
    expected = reference_gradients(weights, sample)
    norms = [math.sqrt(math.fsum(float(g.double().square().sum()) for g in expected.values()))]
    engine = primus_odc.attach(model, **mode)
    for sizes in STEPS:
        copies = sample * sum(sum(s) for s in sizes)
        run_minibatch(engine, model, copies, [list(range(n)) for n in sizes[rank]])
        norms.append(engine.grad_norm())
        assert worst_error(model, expected) <= TOLERANCE
    engine.detach()
    return norms


class _Constant(nn.Module):
    """Every token's loss is the sum of all parameters: the gradient of the mean is one, everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 7))

    def forward(self, tokens: int) -> torch.Tensor:
        return self.weight.sum() * tokens


def _constant_norms(rank: int, world_size: int, mode: dict[str, Any]) -> list[float]:
    model = _Constant()
    fully_shard(model)
    engine = primus_odc.attach(model, **mode)
    norms = [math.sqrt(5 * 7)]
    for sizes in STEPS:
        model.zero_grad()
        engine.begin_minibatch(len(sizes[rank]))
        for n in sizes[rank]:
            (model(n) / sum(sum(s) for s in sizes)).backward()
        engine.settle()
        norms.append(engine.grad_norm())
    engine.detach()
    return norms


def _all_norms(rank: int, world_size: int) -> list[list[float]]:
    return [norms(rank, world_size, mode) for norms in (_gpt_norms, _constant_norms) for mode in MODES]


def test_the_gradient_norm_does_not_follow_the_token_count() -> None:
    assert [sum(map(sum, sizes)) for sizes in STEPS] == [1, 10, 100]
    for runs in run_workers(_all_norms, 2):
        for reference, *norms in runs:
            assert all(math.isclose(norm, reference, rel_tol=TOLERANCE) for norm in norms), (reference, norms)
