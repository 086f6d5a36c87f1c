"""The yardstick of a comparison: a minibatch without any communication.

Each rank holds all parameters and runs the microbatches that LB-Mini gives it, all ranks at once, and then takes an optimizer step on a
shard as large as its shard in an arm. No arm can be faster with the same plan and kernels: what it takes longer is communication and
waiting.

In a comparison (:class:`Ideal`) the weights are those of an arm, copied before every minibatch and outside the measured time, so that the
loss must be that arm's loss. For timings alone a :class:`Replica` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from primus_odc.fsdp.native import whole
from primus_odc.megatron.arm import Arm, Minibatch
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.model import PackedGPT, build_gpt
from primus_odc.megatron.optimizer import build_optimizer, local
from primus_odc.planning import Policy

IDEAL = "ideal"


class Replica:
    """All parameters of a model on one rank, to be trained on that rank's microbatches alone: forward and backward of ``model`` as for
    any module, then :meth:`update`.

    Attributes:
        model: in the dtype that an arm computes in.
        shards: fp32 master weights of this rank's part, as large as in an arm.
        optimizer: of ``shards``.
    """

    def __init__(
        self,
        model: PackedGPT,
        shards: Iterable[torch.Tensor],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        clip_grad: float,
        rank: int,
        world_size: int,
    ) -> None:
        """``shards``: for each parameter of ``model`` its rows ``[rank * n, (rank + 1) * n)``, n being rows / ``world_size`` rounded up;
        ``clip_grad``: the largest gradient norm, 0 for none."""
        self.model = model
        self.shards = nn.ParameterList(nn.Parameter(shard) for shard in shards)
        self.optimizer = make_optimizer(self.shards)
        self._clip_grad = clip_grad or math.inf
        self._rank, self._world_size = rank, world_size

    def update(self) -> None:
        """The optimizer step, clipping included; both the replica's and the shards' gradients are gone afterwards."""
        for shard, parameter in zip(self.shards, self.model.parameters(), strict=True):
            # This rank's own gradient instead of the sum over ranks: of the right size, which is all that its cost depends on.
            if parameter.grad is None:  # a rank without microbatches
                shard.grad = torch.zeros_like(shard)
            else:
                shard.grad = own_rows(parameter.grad, self._rank, self._world_size).to(shard.dtype)
        nn.utils.clip_grad_norm_(self.shards.parameters(), self._clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows of a tensor that FSDP2 gives to a rank: equal parts, rounded up, the last ones shorter or empty."""
    rows = -(-tensor.shape[0] // world_size)
    return tensor[rank * rows : (rank + 1) * rows]


@dataclass(kw_only=True, slots=True, frozen=True)
class IdealRun:
    """One minibatch as one rank ran it; of the device where there is one, else of the host."""

    loss_sum: float
    microbatch_ms: list[float]
    compute_ms: float
    """Forward and backward of all microbatches."""
    optimizer_ms: float


class Ideal:
    """A full replica of an arm's model on every rank; made on all ranks at once.

    Attributes:
        policy: how its minibatches are planned.
    """

    policy: Policy = "lb_mini"

    def __init__(self, source: Arm, params: Mapping[str, Any], vocab_size: int, device: torch.device) -> None:
        """``source`` is the arm whose weights it follows; the other arguments are the arm's own."""
        self._source = source
        self._device = device
        dtype = torch.bfloat16 if params.get("bf16", False) else torch.float32
        source.reshard()
        self._replica = Replica(
            build_gpt(params, vocab_size, device=device, dtype=dtype),
            [local(parameter).clone() for parameter in source.model.parameters()],
            lambda shards: build_optimizer(shards, params),
            float(params.get("clip_grad", 1.0)),
            dist.get_rank(),
            dist.get_world_size(),
        )
        self._scheduler = build_scheduler(self._replica.optimizer, params)

    @torch.no_grad()
    def follow(self) -> None:
        """Take over the arm's present weights; collective, and no part of what is measured."""
        self._source.reshard()
        replica = self._replica
        for own, shard, parameter in zip(replica.model.parameters(), replica.shards, self._source.model.parameters(), strict=True):
            own.copy_(whole(parameter) if isinstance(parameter, DTensor) else parameter)
            shard.copy_(local(parameter))

    def run(self, minibatch: Minibatch) -> IdealRun:
        """Forward, backward and optimizer step of this rank, without a word to the others. On a GPU the device is waited for at the end."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        marks = [self._mark()]
        for microbatch in minibatch.microbatches:
            loss = self._replica.model(microbatch)
            (loss / minibatch.target_tokens).backward()
            total += loss.detach()
            marks.append(self._mark())
        self._replica.update()
        self._scheduler.step(1)
        end = self._mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return IdealRun(
            loss_sum=float(total),
            microbatch_ms=[_ms(before, after) for before, after in pairwise(marks)],
            compute_ms=_ms(marks[0], marks[-1]),
            optimizer_ms=_ms(marks[-1], end),
        )

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))
