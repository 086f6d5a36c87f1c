"""A sharded GPT on demand against one process in fp64: what the cases about a model have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from primus_odc.data.packing import pack_microbatch
from primus_odc.data.samples import Sample
from primus_odc.fsdp.engine import Engine
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.megatron.model import PackedGPT
from primus_odc.megatron.sharding import mixed_precision, shard_gpt
from tests.megatron.gpt_cases import CPU, QWEN2, VOCAB, make_model
from tests.reference_gpt import reference_loss_and_gradients

TOLERANCE = 1e-6
MODES: tuple[dict[str, Any], ...] = (
    {"accumulate": "local", "parameters": "reshard"},
    {"accumulate": "owner", "parameters": "resident"},
    {"accumulate": "local", "parameters": "resident"},
    {"accumulate": "owner", "parameters": "reshard"},
)
VERIFIED: dict[str, Any] = {"accumulate": "owner", "parameters": "reshard", "verify": "reference"}

Assignment = Sequence[Sequence[Sequence[int]]]
"""[rank][microbatch] -> indices of samples; every sample once."""
Gradients = dict[str, torch.Tensor]


def make_samples(lengths: Sequence[int]) -> list[Sample]:
    """Samples with a few frequent tokens, as in text, 60 % of them targets.

    Gradients of frequent tokens add up. With all tokens alike they cancel, and fp32 itself is then not good to 1e-6 of what is left.
    """
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        tokens = np.minimum(rng.geometric(0.4, length), VOCAB - 1).astype(np.int32)
        samples.append(Sample(sample_id=f"s{i}", tokens=tokens, target_mask=mask))
    return samples


def reference_gradients(weights: Mapping[str, Any], samples: Sequence[Sample], params: Mapping[str, Any] = QWEN2) -> Gradients:
    """fp64, one process: the loss summed over the targets of all samples, divided by their number, differentiated."""
    _, gradients, targets = reference_loss_and_gradients(weights, params, samples)
    return {name: gradient / max(targets, 1) for name, gradient in gradients.items()}


def shard(model: PackedGPT, mesh: DeviceMesh | None = None, **options: Any) -> PackedGPT:
    """FSDP2 over ``mesh`` (all ranks), as every arm shards it."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_gpt(model, mesh, mixed_precision({}), **options)


def sharded_gpt(mesh: DeviceMesh | None = None, params: Mapping[str, Any] = QWEN2, **options: Any) -> tuple[PackedGPT, dict[str, Any]]:
    """(the model of ``params`` sharded, its weights before sharding); the same on every rank."""
    model = make_model(params)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return shard(model, mesh, **options), weights


def run_minibatch(
    engine: Engine, model: PackedGPT, samples: Sequence[Sample], own: Sequence[Sequence[int]], *, announce: bool = True
) -> float:
    """This rank's microbatches ``own`` and the settle; returns its share of the minibatch's loss.

    Whatever lies in ``.grad`` is dropped first.
    """
    targets = max(sum(int(s.target_mask.sum()) for s in samples), 1)
    model.zero_grad()
    engine.begin_minibatch(len(own) if announce else None)
    total = 0.0
    for bucket in own:
        loss = model(Microbatch.of(pack_microbatch([samples[i] for i in bucket]), CPU)) / targets
        loss.backward()
        total += float(loss.detach())
    engine.settle()
    return total


def worst_error(model: torch.nn.Module, expected: Gradients) -> float:
    """max over trainable parameters of ||g - g64|| / ||g64||, the same on every rank (collective: one all-reduce).

    Raises:
        AssertionError: another set of parameters is trainable, or one of them has no gradient.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable.keys() == expected.keys()
    squares = torch.zeros(len(expected), 2, dtype=torch.float64)
    for row, (name, parameter) in zip(squares, trainable.items(), strict=True):
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), f"{name} has no gradient"
        mine, theirs = parameter.grad.to_local().double(), own_shard(expected[name], parameter)
        row[0], row[1] = (mine - theirs).square().sum(), theirs.square().sum()
    dist.all_reduce(squares)
    error, norm = squares.sqrt().unbind(1)
    return float((error / norm.where(norm > 0, 1.0)).max())


def own_shard(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The rows of ``whole`` that FSDP2 gives this rank: ceil(rows / ranks) each, the last ones fewer or none."""
    ranks, index = like.device_mesh.size(-1), like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    rows = -(-whole.shape[0] // ranks)
    return whole[index * rows : (index + 1) * rows]


def full_gradients(model: torch.nn.Module) -> Gradients:
    """Whole gradients of every trainable parameter (collective)."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor), f"{name} has no gradient"
            found[name] = parameter.grad.full_tensor()
    return found
