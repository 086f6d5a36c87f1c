from __future__ import annotations

import math

import pytest
import torch

from primus_odc.data.samples import Sample
from primus_odc.errors import OdcError, PlanError
from primus_odc.megatron.arm import StepOutcome
from primus_odc.report.timeline import SpanRecorder, compute_table, make_timeline
from tests.megatron.arm_cases import ARMS, PARAMS, Reference, full, make_arm, minibatch_of, weights
from tests.megatron.gpt_cases import CPU, make_samples, relative_error
from tests.workers import run_workers

WORLD = 2
# Unequal counts on demand, a rank without work (one sample), and token counts that differ tenfold between steps.
MINIBATCHES: tuple[list[Sample], ...] = (
    make_samples((60, 33, 31, 20, 9, 5), seed=1),
    make_samples((12,), seed=2),
    make_samples((64, 64, 40, 8), seed=3),
)


def check_arms(rank: int, world_size: int, device: torch.device = CPU, tolerance: float = 1e-6) -> dict[str, list[StepOutcome]]:
    """``tolerance``: relative, of losses and of the first step's gradients."""
    outcomes: dict[str, list[StepOutcome]] = {}
    for name in ARMS:
        arm = make_arm(name, device)
        reference = Reference(weights(arm))
        outcomes[name] = []
        for step, samples in enumerate(MINIBATCHES):
            lr = arm.learning_rate
            outcome = arm.train_step(minibatch_of(arm, step, samples))
            loss, gradients = reference.step(samples, lr)
            assert outcome.loss is not None and outcome.grad_norm is not None
            assert abs(outcome.loss - loss) <= tolerance * loss, (name, step)
            norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
            assert abs(outcome.grad_norm - norm) <= 10 * tolerance * norm, (name, step)
            if step == 0:
                # The first moment after one step is (1 - beta1) times the gradient.
                for parameter, p in arm.model.named_parameters():
                    gradient = full(arm.optimizer.state[p]["exp_avg"]) / (1 - PARAMS["adam_beta1"])
                    assert relative_error(gradient, gradients[parameter]) <= tolerance, (name, parameter)
            outcomes[name].append(outcome)
        for parameter, trained in weights(arm).items():
            assert relative_error(trained, reference.weights[parameter]) <= 10 * tolerance, (name, parameter)
        arm.close()
    return outcomes


def test_all_arms_train_the_fp64_reference() -> None:
    ranks = run_workers(check_arms, WORLD)
    for name in ARMS:
        first, second = (result[name] for result in ranks)
        for a, b in zip(first, second, strict=True):
            assert (a.loss, a.grad_norm, a.counts) == (b.loss, b.grad_norm, b.counts)
            shares = [[waited / outcome.seconds for waited in outcome.waited_s] for outcome in (a, b)]
            assert shares[0] == pytest.approx(shares[1]) and len(shares[0]) == WORLD and 0 <= min(shares[0]) <= max(shares[0]) <= 1
            assert a.bytes_gathered > 0 and a.seconds > 0
    counts = {name: [outcome.counts for outcome in ranks[0][name]] for name in ARMS}
    assert counts["odc_pad"] == counts["nccl_pad"]
    assert all(a == b for name in ("nccl_pad", "nccl_localsort") for a, b in counts[name])
    assert counts["odc_nopad"][1] == (1, 0) and counts["nccl_zero2"][1] == (1, 1)


def check_between_steps(rank: int, world_size: int) -> list[float]:
    """Evaluation with another number of microbatches on each rank, clipping, spans."""
    losses = []
    for name in ("nccl_pad", "nccl_zero2", "odc_nopad"):
        arm = make_arm(name, clip_grad=0.05)
        arm.train_step(minibatch_of(arm, 0, MINIBATCHES[0]))
        before = weights(arm)
        evaluated = [minibatch_of(arm, i, samples) for i, samples in enumerate(MINIBATCHES)]
        reference = Reference(before)
        everything = [sample for samples in MINIBATCHES for sample in samples]
        expected, _ = reference.step(everything, lr=0.0)
        loss = arm.evaluate(evaluated)
        assert abs(loss - expected) <= 1e-6 * expected, name
        assert all(torch.equal(w, before[parameter]) for parameter, w in weights(arm).items()), name
        recorder = SpanRecorder(rank)
        outcome = arm.train_step(minibatch_of(arm, 1, MINIBATCHES[2]), recorder)
        assert outcome.grad_norm is not None and outcome.grad_norm > 0.05
        spans = recorder.take()
        table = compute_table(make_timeline(name, 1, spans, world_size))
        assert len(table[rank]) == outcome.counts[rank] and min(table[rank]) > 0
        kinds = {span.kind for span in spans}
        assert {"forward", "backward", "communication", "optimizer"} <= kinds
        assert (name == "odc_nopad") == ({"settle", "publish"} <= kinds)
        assert arm.evaluate(evaluated) != loss
        losses.append(loss)
        arm.close()
    return losses


def test_evaluation_clipping_and_spans() -> None:
    losses = run_workers(check_between_steps, WORLD)[0]
    assert max(losses) - min(losses) <= 1e-5 * losses[0]


def check_refusals(rank: int, world_size: int) -> None:
    for name in ("nccl_pad", "odc_nopad"):
        arm = make_arm(name)
        before = weights(arm)
        # As long as on the other rank, so that collectives do not hang, but with other tokens.
        with pytest.raises(PlanError, match=r"step 4: ranks \[1\] hold another minibatch than rank 0"):
            arm.train_step(minibatch_of(arm, 4, make_samples((20, 20), seed=rank)))
        assert all(torch.equal(w, before[parameter]) for parameter, w in weights(arm).items())
        arm.optimizer.zero_grad()
        with torch.no_grad():
            arm.model.decoder.final_layernorm.weight.fill_(math.nan)
        with pytest.raises(OdcError, match=r"step 5: the loss is nan, from ranks \[0, 1\]"):
            arm.train_step(minibatch_of(arm, 5, make_samples((20, 20))))
        arm.close()


def test_different_minibatches_and_numbers_that_are_not_finite_stop_all_ranks() -> None:
    run_workers(check_refusals, WORLD)


def count_collectives(rank: int, world_size: int) -> dict[str, tuple[dict[str, int], int | None]]:
    called: dict[str, tuple[dict[str, int], int | None]] = {}
    for name in ARMS:
        arm = make_arm(name, clip_grad=1.0)
        minibatch = minibatch_of(arm, 0, MINIBATCHES[0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            outcome = arm.train_step(minibatch)
        real = {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
        called[name] = (real, outcome.collectives)
        arm.close()
    return called


def test_on_demand_has_one_collective_a_step_and_the_stock_arms_two_beside_those_of_fsdp2() -> None:
    called = run_workers(count_collectives, WORLD)[0]
    units = 1 + PARAMS["num_layers"]
    microbatches = 2
    for real, told in called.values():
        assert told == sum(real.values()), called
    for name in ("odc_pad", "odc_nopad"):
        assert called[name][1] == 1, called[name]
    # Forward and backward gather each block, and the root once; then the report and the norm.
    assert called["nccl_pad"][1] == microbatches * (units + (units - 1) + units) + 2, called["nccl_pad"]
    assert called["nccl_zero2"][1] == 2 * units + 2, called["nccl_zero2"]
