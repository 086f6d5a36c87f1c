"""The yardstick of a comparison: a minibatch without any communication.

Each rank holds all parameters and runs the microbatches that LB-Mini gives it, all ranks at once, and then takes an optimizer step on a
shard as large as its shard in an arm. No arm can be faster with the same plan and kernels: what it takes longer is communication and
waiting.

The weights are those of an arm, copied before every minibatch and outside the measured time, so that the loss must be that arm's loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from primus_odc.megatron.arm import Arm, Minibatch, build_optimizer
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.model import build_gpt
from primus_odc.planning import Policy

IDEAL = "ideal"


class Ideal:
    """A full replica of an arm's model on every rank; made on all ranks at once.

    Attributes:
        policy: how its minibatches are planned.
    """

    policy: Policy = "lb_mini"

    def __init__(self, source: Arm, params: Mapping[str, Any], vocab_size: int, device: torch.device) -> None:
        """``source`` is the arm whose weights it follows; the other arguments are the arm's own."""
        self._source = source
        self._clip_grad = float(params.get("clip_grad", 1.0))
        self._dtype = torch.bfloat16 if params.get("bf16", False) else torch.float32
        self._model = build_gpt(params, vocab_size, device=device, dtype=self._dtype)
        source.reshard()
        self._shards = nn.ParameterList(nn.Parameter(_local(parameter).clone()) for parameter in source.model.parameters())
        self._optimizer = build_optimizer(self._shards, params)
        self._scheduler = build_scheduler(self._optimizer, params)

    @torch.no_grad()
    def follow(self) -> None:
        """Take over the arm's present weights; collective, and no part of what is measured."""
        self._source.reshard()
        for own, shard, parameter in zip(self._model.parameters(), self._shards, self._source.model.parameters(), strict=True):
            own.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
            shard.copy_(_local(parameter))

    def run(self, minibatch: Minibatch) -> tuple[float, float, float]:
        """Forward, backward and optimizer step of this rank, without a word to the others.

        Returns:
            This rank's loss sum, and the seconds of forward and backward and of the optimizer step.
        """
        total = torch.zeros((), dtype=torch.float64)
        start = time.perf_counter()
        for microbatch in minibatch.microbatches:
            loss = self._model(microbatch)
            (loss / minibatch.target_tokens).backward()
            total += loss.detach()
        computed = time.perf_counter()
        self._take_gradients()
        nn.utils.clip_grad_norm_(self._shards.parameters(), self._clip_grad or math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step(1)
        end = time.perf_counter()
        self._model.zero_grad()
        return float(total), computed - start, end - computed

    def _take_gradients(self) -> None:
        """Give every shard its part of this rank's own gradient: of the right size, which is all that its cost depends on."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for shard, parameter in zip(self._shards, self._model.parameters(), strict=True):
            if parameter.grad is None:  # a rank without microbatches
                shard.grad = torch.zeros_like(shard)
            else:
                rows = -(-parameter.shape[0] // world_size)
                shard.grad = parameter.grad[rank * rows : (rank + 1) * rows].to(shard.dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
