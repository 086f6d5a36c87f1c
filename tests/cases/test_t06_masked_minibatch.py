"""T6: a minibatch without a target token is skipped for real, in every arm, and all ranks know it from the plan."""

from __future__ import annotations

import logging

import torch

from tests.cases.test_t05_masked_microbatch import Messages
from tests.megatron.arm_cases import ARMS, everything, make_arm, masked, minibatch_of
from tests.megatron.gpt_cases import make_samples
from tests.workers import run_workers

WORLD = 2
SAMPLES = [make_samples((60, 31, 20, 9), seed=step) for step in range(2)]
MASKED = [masked(sample) for sample in SAMPLES[0]]


def run_case(rank: int, world_size: int) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for name in ARMS:
        straight = make_arm(name)
        expected = [straight.train_step(minibatch_of(straight, step, samples)) for step, samples in enumerate(SAMPLES)]
        final = everything(straight)
        straight.close()

        messages = Messages()
        logging.getLogger("primus_odc").addHandler(messages)
        arm = make_arm(name)
        first = arm.train_step(minibatch_of(arm, 0, SAMPLES[0]))
        before, rate, schedule = everything(arm), arm.learning_rate, arm.scheduler.state_dict()
        if rank == 0:  # without the other rank: a collective or a rendezvous would hang
            outcome = arm.train_step(minibatch_of(arm, 1, MASKED))
            assert outcome.skipped and outcome.loss is None and outcome.grad_norm is None
        after = everything(arm)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before), name
        assert arm.trained_steps == 1 and arm.learning_rate == rate and arm.scheduler.state_dict() == schedule
        second = arm.train_step(minibatch_of(arm, 2, SAMPLES[1]))
        # As if the masked minibatch had never been there.
        assert [(o.loss, o.grad_norm, o.learning_rate) for o in (first, second)] == [
            (o.loss, o.grad_norm, o.learning_rate) for o in expected
        ], name
        trained = everything(arm)
        assert all(torch.equal(final[key], trained[key]) for key in final), name
        arm.close()
        logging.getLogger("primus_odc").removeHandler(messages)
        told[name] = messages.texts
    return told


def test_minibatch_without_targets_is_skipped_and_reported() -> None:
    results = run_workers(run_case, WORLD)
    for name in ARMS:
        assert results[0][name] == ["step 1 skipped: none of its 4 samples has a target token"]
        assert results[1][name] == []
