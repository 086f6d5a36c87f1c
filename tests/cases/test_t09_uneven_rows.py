"""T9: parameters whose rows do not divide by the number of ranks, or are fewer than it; 1, 2 and 3 ranks.

Right: exact gradients in every minibatch of a row (no factor that doubles from one to the next), the norm over all shards that of the
reference (padding counts nothing), and a parameter update that reaches every row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import primus_odc
from primus_odc.data.samples import Sample
from primus_odc.megatron.model import build_gpt
from tests.cases.gpt_ranks import MODES, TOLERANCE, VERIFIED, reference_gradients, run_minibatch, shard, worst_error
from tests.megatron.gpt_cases import CPU, QWEN2
from tests.workers import run_workers

# Two rows in embedding and head; 11 in norms and output projections, 14 in the MLP, 20 for query, key and value.
PARAMS: dict[str, Any] = {
    **QWEN2,
    "hidden_size": 11,
    "ffn_hidden_size": 7,
    "num_attention_heads": 3,
    "num_query_groups": 1,
    "kv_channels": 4,
}
VOCAB = 2
LENGTHS = (9, 4, 6, 2)
# [minibatch][rank] -> microbatches
ASSIGNMENTS: dict[int, list[list[list[list[int]]]]] = {
    1: [[[[0, 1], [2], [3]]], [[[0, 1, 2, 3]]], [[[3], [2, 1], [0]]]],
    2: [[[[0], [1], [2]], [[3]]], [[], [[0, 1], [2, 3]]], [[[0, 3]], [[2, 1]]]],
    3: [[[[0], [1]], [[2]], [[3]]], [[], [[0, 1], [2, 3]], []], [[[0]], [[3]], [[2, 1]]]],
}


def _samples() -> list[Sample]:
    """Mostly token 1, so that the tokens' gradients add up; where they cancel, fp32 itself is not good to 1e-6."""
    rng = np.random.default_rng(3)
    return [
        Sample(sample_id=str(i), tokens=(rng.random(n) < 0.8).astype(np.int32), target_mask=np.arange(n) > 0) for i, n in enumerate(LENGTHS)
    ]


def _minibatches(rank: int, world_size: int) -> set[int]:
    """The numbers of rows this rank has of any parameter."""
    samples = _samples()
    local_rows: set[int] = set()
    for mode in (*MODES, VERIFIED):
        model = shard(build_gpt(PARAMS, VOCAB, device=CPU))
        engine = primus_odc.attach(model, **mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for assignment in ASSIGNMENTS[world_size]:
            weights = {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}
            expected = reference_gradients(weights, samples, PARAMS)
            run_minibatch(engine, model, samples, assignment[rank])
            assert worst_error(model, expected) <= TOLERANCE
            norm = math.sqrt(math.fsum(float(g.square().sum()) for g in expected.values()))
            assert math.isclose(engine.grad_norm(), norm, rel_tol=TOLERANCE)
            optimizer.step()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and parameter.shape == weights[name].shape
            local_rows.add(parameter.to_local().shape[0])
        engine.detach()
    return local_rows


@pytest.mark.parametrize("world_size", ASSIGNMENTS)
def test_uneven_shards_are_exact(world_size: int) -> None:
    rows = run_workers(_minibatches, world_size)
    if world_size == 3:
        assert 0 in rows[2], "no parameter has fewer rows than ranks: the case tests nothing"
