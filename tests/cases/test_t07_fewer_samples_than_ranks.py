"""T7: five samples on eight ranks: three ranks run nothing, and their shards are updated all the same.

Right: no error and no hang; the ranks without samples neither compute nor gather, and after the optimizer step their shard of every
parameter is where one process in fp64 puts it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import primus_odc
from primus_odc.planning import CostModel, plan_minibatch
from tests.cases.gpt_ranks import MODES, TOLERANCE, make_samples, reference_gradients, run_minibatch, sharded_gpt, worst_error
from tests.megatron.gpt_cases import QWEN2, relative_error
from tests.workers import run_workers

RANKS = 8
LENGTHS = (14, 3, 9, 5, 7)
LEARNING_RATE = 0.1


def _step(rank: int, world_size: int) -> list[dict[str, Any]]:
    samples = make_samples(LENGTHS)
    plan = plan_minibatch("lb_mini", LENGTHS, world_size, QWEN2["seq_length"], CostModel.from_config("linear"))
    outcomes = []
    for mode in MODES[:2]:
        model, weights = sharded_gpt()
        expected = reference_gradients(weights, samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        engine = primus_odc.attach(model, **mode)
        run_minibatch(engine, model, samples, plan.microbatches[rank])
        stats = engine.stats()
        assert worst_error(model, expected) <= TOLERANCE
        optimizer.step()
        moved = 0
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            after = parameter.full_tensor()
            step = after.double() - weights[name].double()
            # The step itself is rounded to what fp32 can tell apart at the weight's size.
            assert relative_error(after, weights[name].double() - LEARNING_RATE * expected[name]) <= TOLERANCE, name
            assert relative_error(step, -LEARNING_RATE * expected[name]) <= 1e-3, name
            moved += parameter.to_local().numel()
        # Every rank sees the others' new shards, those of the idle ranks included.
        weights = {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        run_minibatch(engine, model, samples, plan.microbatches[rank])
        assert worst_error(model, reference_gradients(weights, samples)) <= TOLERANCE
        engine.detach()
        outcomes.append({"count": stats["microbatches"], "gathered": stats["bytes_gathered"], "moved": moved})
    return outcomes


@pytest.mark.timeout(120)
def test_ranks_without_samples_run_nothing_and_are_updated() -> None:
    results = run_workers(_step, RANKS, timeout_s=100)
    for of_ranks in zip(*results, strict=True):
        assert sorted(o["count"] for o in of_ranks) == [0, 0, 0, 1, 1, 1, 1, 1]
        for outcome in of_ranks:
            assert (outcome["gathered"] == 0) == (outcome["count"] == 0)
            assert outcome["moved"] > 0
