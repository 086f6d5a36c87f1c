"""What the tests of the arms share: parameters, minibatches with known samples, and plain fp64 AdamW over the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from primus_odc.config import parse_odc
from primus_odc.data.samples import Sample
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.minibatch import Minibatch, make_minibatch
from primus_odc.planning import CostModel
from tests.megatron.gpt_cases import CPU, QWEN2, VOCAB
from tests.reference_gpt import reference_loss_and_gradients

CAP = 64
LINEAR = CostModel.from_config("linear")
# No warm-up from 0, so that the first step moves the weights; eps large, because Adam divides rounding of near-zero gradients by it.
PARAMS: dict[str, Any] = {
    **QWEN2,
    "train_iters": 10,
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-4,
    "clip_grad": 0.0,
}
ARMS: dict[str, dict[str, Any]] = {
    "nccl_pad": {"comm_backend": "nccl_pad"},
    "nccl_localsort": {"comm_backend": "nccl_pad", "odc": {"baseline": "localsort"}},
    "nccl_zero2": {"comm_backend": "nccl_pad", "odc": {"baseline": "zero2"}},
    "odc_pad": {"comm_backend": "odc_pad", "odc": {"timeout_s": 30}},
    "odc_nopad": {"comm_backend": "odc_nopad", "odc": {"timeout_s": 30}},
}


def make_arm(name: str, device: torch.device = CPU, **changed: Any) -> Arm:
    """On all ranks of the process group."""
    arm = Arm({**PARAMS, **changed}, parse_odc(ARMS[name]), VOCAB, init_device_mesh(device.type, (dist.get_world_size(),)), device)
    assert arm.name == name
    return arm


def minibatch_of(arm: Arm, step: int, samples: Sequence[Sample]) -> Minibatch:
    return make_minibatch(
        step,
        samples,
        policy=arm.policy,
        cost_model=LINEAR,
        max_tokens=CAP,
        world_size=arm.world_size,
        rank=arm.rank,
        device=next(arm.model.parameters()).device,
        pad_empty_ranks=arm.pad_empty_ranks,
    )


def masked(sample: Sample) -> Sample:
    """The sample without any target."""
    return Sample(sample_id=sample.sample_id, tokens=sample.tokens, target_mask=sample.target_mask & False)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the CPU; a collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def weights(arm: Arm) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in arm.model.named_parameters()}


def moments(arm: Arm) -> dict[str, torch.Tensor]:
    """AdamW's state of every parameter."""
    named = arm.model.named_parameters()
    return {f"{name}.{key}": full(value) for name, p in named for key, value in arm.optimizer.state.get(p, {}).items()}


def everything(arm: Arm) -> dict[str, torch.Tensor]:
    """What training changes."""
    return {**weights(arm), **moments(arm)}


@dataclass
class Reference:
    """Plain AdamW in fp64 over whole minibatches, in one process; decay and groups written out again from their definition."""

    weights: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.weights = {name: w.double() for name, w in self.weights.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.steps = 0

    def step(self, samples: Sequence[Sample], lr: float) -> tuple[float, dict[str, torch.Tensor]]:
        """(loss, gradients) before the update."""
        total, gradients, targets = reference_loss_and_gradients(self.weights, PARAMS, samples)
        self.steps += 1
        b1, b2 = PARAMS["adam_beta1"], PARAMS["adam_beta2"]
        gradients = {name: g / targets for name, g in gradients.items()}
        for name, g in gradients.items():
            w = self.weights[name]
            if w.ndim > 1:
                w = w * (1 - lr * PARAMS["weight_decay"])
            self.first[name] = b1 * self.first[name] + (1 - b1) * g
            self.second[name] = b2 * self.second[name] + (1 - b2) * g * g
            corrected = self.first[name] / (1 - b1**self.steps)
            scale = (self.second[name] / (1 - b2**self.steps)).sqrt() + PARAMS["adam_eps"]
            self.weights[name] = w - lr * corrected / scale
        return float(total) / targets, gradients
