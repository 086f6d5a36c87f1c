"""The optimizer of the trainer against torch's own over the same DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primus_odc.megatron.optimizer import ShardAdamW
from tests.megatron.arm_cases import full
from tests.workers import run_workers

SHAPES = ((7, 5), (1, 3), (4,))  # on two ranks: uneven, empty on one, even
BETAS, EPS, RATES = (0.9, 0.95), 1e-8, (1e-2, 3e-3, 1e-3)


def parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])) for shape in SHAPES]


def state_of(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> list[torch.Tensor]:
    return [full(tensor) for p in own for tensor in (p, *(optimizer.state[p][key] for key in ("step", "exp_avg", "exp_avg_sq")))]


def compare(rank: int, world_size: int) -> None:
    own, plain = parameters(), parameters()
    groups = [[{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "weight_decay": 0.0}] for p in (own, plain)]
    lasting = [torch.zeros_like(p) for p in own]
    ours = ShardAdamW(groups[0], betas=BETAS, eps=EPS, lasting_gradients=True)
    theirs = torch.optim.AdamW(groups[1], betas=BETAS, eps=EPS, fused=True)
    mesh = own[0].device_mesh  # type: ignore[attr-defined]  # DTensor
    generator = torch.Generator().manual_seed(1)
    for step, rate in enumerate(RATES):
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"] = rate
        for i, shape in enumerate(SHAPES):
            if step == 1 and i == 0:
                continue  # a parameter without a gradient keeps its step count
            gradient = distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])
            lasting[i].to_local().copy_(gradient.to_local())  # type: ignore[attr-defined]  # DTensor
            own[i].grad, plain[i].grad = lasting[i], gradient
        if step == 2:
            # As a checkpoint gives it back: other tensors.
            ours.load_state_dict(ours.state_dict())
            before = state_of(ours, own)
            ours.step(skip=torch.ones(()))
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(ours, own), strict=True))
        ours.step(skip=torch.zeros(()) if step == 1 else None)
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for mine, expected in zip(state_of(ours, own), state_of(theirs, plain), strict=True):
        assert torch.equal(mine, expected)


def test_steps_are_those_of_torch_bit_for_bit_and_can_be_skipped() -> None:
    run_workers(compare, 2)
