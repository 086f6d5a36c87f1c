"""T11: Megatron's loss contract on its torch FSDP2, with ``calculate_per_token_loss`` true and false.

Megatron's own schedule and ``finalize_model_grads`` drive the wrapper. Right, each against its own definition in fp64: true is the loss
summed over all tokens divided by the tokens of all ranks, for any counts; false is the mean over ranks of each rank's mean of microbatch
means, and is refused where the counts differ. Megatron's wrapper would give gradients tokens / ranks times too large for true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads, torch_fully_sharded_data_parallel
from megatron.core.pipeline_parallel import schedules
from torch.distributed.device_mesh import DeviceMesh

from primus_odc.config import parse_options
from primus_odc.data.packing import pack_microbatch
from primus_odc.errors import ConfigError
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.megatron.wrapper import OnDemandFSDP, SummedFSDP
from tests.cases.gpt_ranks import MODES, TOLERANCE, VERIFIED, Gradients, make_samples, worst_error
from tests.fsdp.checks import failures, run_checks
from tests.megatron.gpt_cases import CPU, QWEN2, make_model
from tests.reference_gpt import reference_loss_and_gradients
from tests.workers import run_workers

SAMPLES = make_samples((9, 4, 17, 6, 3, 12))
EQUAL = ([[0], [1, 2]], [[3, 4], [5]])
UNEQUAL = ([[0], [1, 2], [3]], [[4, 5]])
IDLE: tuple[list[list[int]], ...] = ([[0], [1, 2, 3, 4, 5]], [])
Assignment = Sequence[Sequence[Sequence[int]]]


class _MeshOnCpu:
    """In Megatron's wrapper: ``DeviceMesh.from_group`` names "cuda"."""

    @staticmethod
    def from_group(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu")


class _TorchOnCpu:
    """In Megatron's schedule: the token counter is made on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: str, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **kwargs)


@contextlib.contextmanager
def _megatron_on_cpu() -> Iterator[None]:
    with (
        mock.patch.object(torch_fully_sharded_data_parallel, "DeviceMesh", _MeshOnCpu),
        mock.patch.object(schedules, "torch", _TorchOnCpu()),
    ):
        yield


def _wrapped(kind: type[SummedFSDP] | type[OnDemandFSDP], per_token: bool, **arguments: Any) -> Any:
    model = make_model(QWEN2)
    model.config.calculate_per_token_loss = per_token
    model.config.transformer_impl = "local"  # the wrapper asks, to decide what becomes a unit
    model.config.finalize_model_grads_func = finalize_model_grads
    return kind(model.config, DistributedDataParallelConfig(), model, **arguments)


def _forward_step(iterator: Iterator[Sequence[int]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's: the output, and a function that makes (loss sum, number of tokens, report) of it."""
    microbatch = Microbatch.of(pack_microbatch([SAMPLES[i] for i in next(iterator)]), CPU)
    tokens = torch.tensor(microbatch.num_targets, dtype=torch.int)
    return model(microbatch), lambda output: (output.clone(), tokens, {"loss": output.detach()})


def _train_step(wrapper: Any, own: Sequence[Sequence[int]]) -> None:
    """As Megatron's train_step up to the optimizer."""
    wrapper.zero_grad_buffer()
    wrapper.module.zero_grad()
    if own:
        schedules.forward_backward_no_pipelining(
            forward_step_func=_forward_step,
            data_iterator=iter(own),
            model=wrapper,
            num_microbatches=len(own),
            seq_length=QWEN2["seq_length"],
            micro_batch_size=1,
        )
    else:  # the schedule always runs one: a rank without samples finalizes itself
        finalize_model_grads([wrapper], torch.zeros([], dtype=torch.int) if wrapper.config.calculate_per_token_loss else None)


def _reference(wrapper: Any, assignment: Assignment, per_token: bool) -> Gradients:
    weights = {name: p.full_tensor().detach() for name, p in wrapper.module.named_parameters()}
    expected = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}
    every = sum(int(s.target_mask.sum()) for s in SAMPLES)
    for microbatches in assignment:
        for bucket in microbatches:
            _, gradients, targets = reference_loss_and_gradients(weights, QWEN2, [SAMPLES[i] for i in bucket])
            divisor = every if per_token else targets * len(microbatches) * len(assignment)
            for name, gradient in gradients.items():
                expected[name] += gradient / divisor
    return expected


def _matches(wrapper: Any, per_token: bool, assignments: Sequence[Assignment]) -> None:
    optimizer = torch.optim.SGD(wrapper.module.parameters(), lr=0.01)
    for assignment in assignments:
        expected = _reference(wrapper, assignment, per_token)
        _train_step(wrapper, assignment[dist.get_rank()])
        assert worst_error(wrapper.module, expected) <= TOLERANCE
        optimizer.step()


def on_demand_per_token() -> None:
    for mode in (*MODES, VERIFIED):
        wrapper = _wrapped(OnDemandFSDP, True, odc=parse_options(mode))
        _matches(wrapper, True, (UNEQUAL, EQUAL, IDLE))
        wrapper.detach()


def on_demand_mean_of_means() -> None:
    for mode in MODES[:2]:
        wrapper = _wrapped(OnDemandFSDP, False, odc=parse_options(mode))
        _matches(wrapper, False, (EQUAL, EQUAL))
        wrapper.detach()


def unequal_counts_need_per_token_loss() -> None:
    for assignment in (UNEQUAL, IDLE):
        wrapper = _wrapped(OnDemandFSDP, False)
        with pytest.raises(ConfigError, match="calculate_per_token_loss: true"):
            _train_step(wrapper, assignment[dist.get_rank()])
        wrapper.detach()


def collectives_per_token() -> None:
    _matches(_wrapped(SummedFSDP, True), True, (EQUAL, EQUAL))


def collectives_mean_of_means() -> None:
    _matches(_wrapped(SummedFSDP, False), False, (EQUAL, EQUAL))


def announced_counts() -> None:
    wrapper = _wrapped(OnDemandFSDP, True)
    for assignment in (UNEQUAL, IDLE):
        expected = _reference(wrapper, assignment, True)
        wrapper.num_microbatches = len(assignment[dist.get_rank()])
        _train_step(wrapper, assignment[dist.get_rank()])
        assert worst_error(wrapper.module, expected) <= TOLERANCE
    wrapper.detach()


def a_rerun_starts_anew() -> None:
    wrapper = _wrapped(OnDemandFSDP, True)
    expected = _reference(wrapper, UNEQUAL, True)
    for _ in range(2):
        _train_step(wrapper, UNEQUAL[dist.get_rank()])
    assert worst_error(wrapper.module, expected) <= TOLERANCE
    wrapper.detach()


def evaluation_sees_the_new_parameters() -> None:
    wrapper = _wrapped(OnDemandFSDP, True)
    microbatch = Microbatch.of(pack_microbatch(SAMPLES[:2]), CPU)
    optimizer = torch.optim.SGD(wrapper.module.parameters(), lr=0.1)
    for _ in range(2):
        _train_step(wrapper, UNEQUAL[dist.get_rank()])
        optimizer.step()
        weights = {name: p.full_tensor().detach() for name, p in wrapper.module.named_parameters()}
        expected, _, _ = reference_loss_and_gradients(weights, QWEN2, SAMPLES[:2])
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):
                torch.testing.assert_close(wrapper(microbatch).double(), expected, rtol=1e-5, atol=0.0)
    wrapper.detach()


def whole_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="save_wgrads_interval"):
        _wrapped(SummedFSDP, True).finish_grad_sync(force_all_reduce=True)


CHECKS = {
    f.__name__: f
    for f in (
        on_demand_per_token,
        on_demand_mean_of_means,
        unequal_counts_need_per_token_loss,
        collectives_per_token,
        collectives_mean_of_means,
        announced_counts,
        a_rerun_starts_anew,
        evaluation_sees_the_new_parameters,
        whole_gradients_are_refused,
    )
}


def _run(rank: int, world_size: int) -> dict[str, str]:
    with _megatron_on_cpu():
        return run_checks(rank, world_size, CHECKS)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(_run, 2, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_loss_contract(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
