"""A training script of its own (no elastic agent), one rank of which is killed by the test (test_t18_killed_rank.py)."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import primus_odc
from tests.fsdp.machines import engines_on_machines, move_to_machine
from tests.fsdp.models import loss_of, microbatch, shard, tiny_model


def main() -> None:
    rank, world_size, store, mode, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5])
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if mode == "machines":
        move_to_machine(rank, sys.argv[6:], 2)
        engines_on_machines(Path(store).parent, world_size)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = shard(tiny_model())
    options = {"ranks_per_node": 2} if mode in ("nodes", "machines") else {"accumulate": mode}
    engine = primus_odc.attach(model, **options, timeout_s=timeout_s)
    for step in range(10_000):
        engine.begin_minibatch()
        for i in range(1 + (step + rank) % 2):
            x, y = microbatch(step, rank, i)
            loss_of(model, x, y, 1).backward()
            time.sleep(0.01)
        engine.settle()
        model.zero_grad()
        if step == 2:
            print(f"running {os.getpid()}", flush=True)
