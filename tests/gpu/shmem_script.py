"""A training script as users write them, for one rank of torchrun: it ends by itself, library and all."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import primus_odc
from tests.gpu.models import SHMEM, inputs, loss, shard_wide, wide


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    model = shard_wide(wide(depth=2))
    engine = primus_odc.attach(model, transport=SHMEM, ranks_per_node=1)
    for step in range(2):
        engine.begin_minibatch(1)
        loss(model, inputs(step, rank, 0)).backward()
        engine.settle()
        model.zero_grad()
    engine.detach()
    dist.destroy_process_group()
    print(f"rank {rank} trained", flush=True)


if __name__ == "__main__":
    main()
