from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from primus_odc.data.packing import pack_microbatch
from primus_odc.errors import ConfigError
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.megatron.model import PackedGPT
from primus_odc.megatron.sharding import mixed_precision, shard_gpt
from tests.megatron.gpt_cases import CPU, QWEN2, make_model, make_samples, relative_error
from tests.reference_gpt import reference_loss_and_gradients
from tests.workers import run_workers

WORLD = 2
SAMPLES_OF_RANK = ((0, 2), (1, 3))
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# (name, changed keys, shard_gpt's options, largest relative error)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("stock", {}, {}, 1e-6),
    ("separate head", {}, {"separate_head": True}, 1e-6),
    ("kept parameters", {}, {"reshard_after_forward": False}, 1e-6),
    ("recomputed", RECOMPUTED, {}, 1e-6),
    ("bf16", {"bf16": True}, {"separate_head": True}, 3e-2),
]


def units(model: PackedGPT) -> int:
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def run_case(rank: int, changed: dict[str, Any], options: dict[str, Any], tolerance: float) -> dict[str, int]:
    """One microbatch a rank, stock communication, against the reference. Returns how often each collective was called."""
    params, samples = {**QWEN2, **changed}, make_samples((23, 1, 40, 7))
    model = make_model(params)
    expected_loss, expected, targets = reference_loss_and_gradients(model.state_dict(), params, samples)
    shard_gpt(model, init_device_mesh("cpu", (WORLD,)), mixed_precision(params), **options)
    assert units(model) == QWEN2["num_layers"] + 1 + options.get("separate_head", False)
    microbatch = Microbatch.of(pack_microbatch([samples[i] for i in SAMPLES_OF_RANK[rank]]), CPU)
    with CommDebugMode() as counted:
        loss = model(microbatch)
        (loss * WORLD / targets).backward()  # stock FSDP2 averages over the ranks
    assert loss.dtype == torch.float32
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert relative_error(total, expected_loss) <= tolerance
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        error = relative_error(parameter.grad.full_tensor(), expected[name] / targets)
        assert error <= tolerance, (name, error)
    return {str(collective): count for collective, count in counted.get_comm_counts().items()}


def run_cases(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    return {name: run_case(rank, changed, options, tolerance) for name, changed, options, tolerance in CASES}


@pytest.mark.timeout(150)  # each worker imports megatron-core first
def test_two_ranks_with_stock_communication_equal_the_reference() -> None:
    for calls in run_workers(run_cases, WORLD, timeout_s=140):
        assert calls["recomputed"] == calls["stock"], calls  # recomputation gathers nothing more
        assert sum(calls["kept parameters"].values()) < sum(calls["stock"].values()), calls


def test_the_precision_follows_megatrons_keys() -> None:
    assert mixed_precision({}) == MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed, reduced = mixed_precision({"bf16": True}), mixed_precision({"bf16": True, "grad_reduce_in_bf16": True})
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (reduced.param_dtype, reduced.reduce_dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.usefixtures("one_rank")
def test_rounding_the_rotary_angles_is_refused() -> None:
    with pytest.raises(ConfigError, match="cast_forward_inputs"):
        shard_gpt(make_model(QWEN2), init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16))
