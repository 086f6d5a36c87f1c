"""The loop of an arm around Megatron's schedule and gradient finalization: gradients against the plain reference, and everything that is
left out of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine

from primus_odc.config import CommBackend, OdcConfig, ParsedComm
from primus_odc.errors import OdcError, PlanError, VersionError
from primus_odc.megatron.meter import Meter
from primus_odc.megatron.wrapper import OnDemand
from primus_odc.primus.loop import ArmLoop
from primus_odc.primus.report import StepReporter
from primus_odc.report.logs import StepRecord, read_step_log
from tests.cases.gpt_ranks import TOLERANCE, worst_error
from tests.cases.test_t11_per_token_loss import _megatron_on_cpu
from tests.megatron.gpt_cases import QWEN2
from tests.primus.loop_case import PASSES, SAMPLES, Assignment, GivenSource, forward_step, make_training, wrap
from tests.reference_gpt import reference_loss_and_gradients
from tests.workers import WorkerFailedError, run_workers

EQUAL: Assignment = ([[0], [1, 2]], [[3, 4], [5]])
UNEQUAL: Assignment = ([[0], [1, 2], [3]], [[4, 5]])
IDLE: Assignment = ([[0], [1, 2, 3, 4, 5]], [])
MASKED = None


class Run:
    """One run of an arm on this rank, stopped at every step."""

    def __init__(self, backend: CommBackend, assignments: Sequence[Assignment | None], rank: int, ranks: int, **source: Any) -> None:
        self.args = SimpleNamespace(
            iteration=0, consumed_train_samples=0, check_for_nan_in_loss_and_grad=True, seed=1, global_batch_size=len(SAMPLES)
        )
        self.comm = ParsedComm(comm_backend=backend, odc=OdcConfig(timeout_s=30))
        meter = Meter()
        self.reporter = StepReporter(self.comm.arm, meter, log_interval=1, train_iters=len(assignments))
        self.loop = ArmLoop(self.comm, self.reporter, meter)
        self.source = GivenSource(assignments, rank, ranks, **source)
        self.training = make_training(self.args)

    def train(self, skip: Sequence[int] = (), log: Path | None = None) -> list[Any]:
        """[step] what Megatron's train() gets of each step; those of ``skip`` are skipped as by iterations_to_skip."""
        results: list[Any] = []
        native = dict(vars(self.training))
        rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
        with _megatron_on_cpu(), self.loop.installed(self.training):
            wrapper = wrap(self.training)
            self.loop.use(self.source)
            if log is not None and self.source.rank == 0:
                self.reporter.open(log, 0, self.args, {}, {})
            optimizer = torch.optim.SGD(wrapper.module.parameters(), lr=0.01)
            for step, assignment in enumerate(self.source.assignments):
                before = {name: p.full_tensor().detach() for name, p in wrapper.module.named_parameters()}
                if step in skip:
                    self.training.dummy_train_step(self.source)
                    results.append(None)
                else:
                    results.append(
                        self.training.train_step(
                            forward_step, self.source, [wrapper], optimizer, None, wrapper.config, PASSES, iteration=step
                        )
                    )
                    if assignment is not None:
                        loss = _require_reference(wrapper, before, assignment)
                        assert float(results[-1][0]["lm loss"]) == pytest.approx(loss, rel=1e-6)
                        optimizer.step()
                self.args.consumed_train_samples += len(SAMPLES)
            assert not isinstance(wrapper, OnDemand) or wrapper.engine is not None
        assert not isinstance(wrapper, OnDemand) or wrapper.engine is None
        assert vars(self.training) == native
        assert self.source.closed
        return results


def _require_reference(wrapper: Any, weights: dict[str, torch.Tensor], assignment: Assignment) -> float:
    """Gradients are those of the loss sum over all targets, divided by their number; returns that loss."""
    expected = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}
    total, every = 0.0, sum(int(s.target_mask.sum()) for s in SAMPLES)
    for bucket in (bucket for buckets in assignment for bucket in buckets):
        loss, gradients, _ = reference_loss_and_gradients(weights, QWEN2, [SAMPLES[i] for i in bucket])
        total += float(loss)
        for name, gradient in gradients.items():
            expected[name] += gradient / every
    assert worst_error(wrapper.module, expected) <= TOLERANCE
    return total / every


def _arm(rank: int, ranks: int, backend: CommBackend, assignments: Sequence[Assignment | None], log: str) -> None:
    run = Run(backend, assignments, rank, ranks)
    results = run.train(skip=(2,), log=Path(log))
    assert results[1] == ({}, 1, False, False, 0, None, None, 0)
    assert run.source.begun == [(step, step * len(SAMPLES)) for step in range(len(assignments))]


@pytest.mark.parametrize(
    ("backend", "assignments"),
    [
        ("nccl_pad", (EQUAL, MASKED, EQUAL, EQUAL)),
        ("odc_pad", (EQUAL, MASKED, EQUAL, EQUAL)),
        ("odc_nopad", (UNEQUAL, MASKED, EQUAL, IDLE, EQUAL)),
    ],
)
def test_gradients_skipped_steps_and_log(backend: CommBackend, assignments: Sequence[Assignment | None], tmp_path: Path) -> None:
    run_workers(_arm, 2, backend, assignments, str(tmp_path))
    log = read_step_log(tmp_path)
    assert log.header.arm == backend
    assert [record.skipped for record in log.steps] == [step in (1, 2) for step in range(len(assignments))]
    counts = [[len(buckets) for buckets in assignment or [[[0]]] * 2] for assignment in assignments]
    assert [record.microbatches for record in log.steps] == counts
    moved: list[StepRecord] = [record for record in log.steps if not record.skipped]
    assert all(record.loss and record.learning_rate == 0.01 and max(record.waited_s) > 0 for record in moved)


def test_another_megatron_is_refused_by_name() -> None:
    run = Run("nccl_pad", (EQUAL,), 0, 1)
    del run.training.dummy_train_step
    reason = r"has no dummy_train_step, which this release replaces: use megatron-core>=0\.16"
    with pytest.raises(VersionError, match=reason), run.loop.installed(run.training):
        pass


def _disagree(rank: int, ranks: int) -> None:
    Run("nccl_pad", (EQUAL,), rank, ranks, digest=f"of rank {rank}").train()


def test_ranks_with_other_plans_stop_before_the_first_pass() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(_disagree, 2)
    assert len(caught.value.tracebacks) == 2
    assert all(f"{PlanError.__name__}: step 1: ranks [1] hold another minibatch" in text for text in caught.value.tracebacks.values())


def _drift(rank: int, ranks: int) -> None:
    run = Run("odc_nopad", (EQUAL, EQUAL), rank, ranks)
    begin = run.source.begin

    def begin_and_drift(step: int, consumed_samples: int) -> Any:
        plan = begin(step, consumed_samples)
        return replace(plan, digest=f"step {step} of rank {rank}") if step == 1 else plan

    run.source.begin = begin_and_drift  # type: ignore[method-assign]
    run.train()


def test_ranks_whose_plans_drift_apart_stop_after_that_step() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(_drift, 2)
    assert len(caught.value.tracebacks) == 2
    assert all(f"{PlanError.__name__}: step 2: ranks [1] trained on another" in text for text in caught.value.tracebacks.values())


def _unwrapped(rank: int, ranks: int) -> None:
    run = Run("odc_nopad", (EQUAL,), rank, ranks)
    with _megatron_on_cpu(), run.loop.installed(run.training):
        if rank == 1:
            run.training.torch_FSDP = make_training(run.args).torch_FSDP
        wrapper = wrap(run.training)
        run.loop.use(run.source)
        run.training.train_step(forward_step, run.source, [wrapper], None, None, wrapper.config, PASSES, iteration=0)


def test_a_model_that_was_not_wrapped_stops_all_ranks() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(_unwrapped, 2)
    assert len(caught.value.tracebacks) == 2
    assert all(
        f"{OdcError.__name__}: the model of ranks [1] is not wrapped for odc_nopad" in text for text in caught.value.tracebacks.values()
    )


def _not_finite(rank: int, ranks: int) -> None:
    run = Run("odc_nopad", (EQUAL,), rank, ranks)
    native = run.training.train_step
    run.training.train_step = lambda *args, **kwargs: ({"lm loss": torch.tensor(float("nan"))}, *native(*args, **kwargs)[1:])
    run.train()


def test_a_loss_that_is_not_finite_stops_all_ranks() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(_not_finite, 2)
    assert len(caught.value.tracebacks) == 2
    assert all("step 1: the loss is nan" in text for text in caught.value.tracebacks.values())
