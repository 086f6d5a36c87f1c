"""T2: two ranks with 3 and 5 microbatches have the gradient of one process on all samples, whichever rank has which sample.

Right: ||g - g64|| / ||g64|| <= 1e-6 for every parameter and every one of the 56 assignments of 8 samples to the two ranks. Collectives
would hang here, and a mean over microbatches or ranks would weigh the samples of the two ranks differently.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

import primus_odc
from tests.cases.gpt_ranks import MODES, TOLERANCE, VERIFIED, make_samples, reference_gradients, run_minibatch, sharded_gpt, worst_error
from tests.workers import run_workers

COUNTS = (3, 5)
LENGTHS = (9, 2, 17, 5, 3, 12, 7, 4)  # one microbatch each; tokens and targets differ


def _every_assignment(rank: int, world_size: int) -> dict[str, float]:
    samples = make_samples(LENGTHS)
    model, weights = sharded_gpt()
    expected = reference_gradients(weights, samples)
    assignments = list(combinations(range(len(samples)), COUNTS[0]))
    assert len(assignments) == 56
    errors: dict[str, float] = {}
    modes: list[dict[str, Any]] = [*MODES, VERIFIED]
    for number, mode in enumerate(modes):
        engine = primus_odc.attach(model, **mode)
        for of_rank_0 in assignments[number :: len(modes)]:
            mine = of_rank_0 if rank == 0 else [i for i in range(len(samples)) if i not in of_rank_0]
            assert len(mine) == COUNTS[rank]
            run_minibatch(engine, model, samples, [[i] for i in mine])
            assert engine.stats()["microbatches"] == COUNTS[rank]
            errors[f"rank 0 has {of_rank_0}, {mode}"] = worst_error(model, expected)
        engine.detach()
    return errors


@pytest.mark.timeout(120)
def test_every_assignment_to_two_ranks_equals_one_process() -> None:
    for errors in run_workers(_every_assignment, 2, timeout_s=100):
        assert len(errors) == 56
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}
