"""The engine on two machines over a library that a test plays: machines are nodes, the way between them is found and told to the library,
and a GPU has to keep the order of a network card's writes. Machines are network namespaces."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import primus_odc
from primus_odc.errors import ConfigError
from primus_odc.symmetric.shmem import memory
from tests.fsdp.machines import move_to_machine
from tests.fsdp.models import check_gradients, shard, tiny_model
from tests.fsdp.test_nodes import COUNTS
from tests.symmetric.hosts import ADDRESSES, two_hosts
from tests.symmetric.shmem.process_library import FileArena, play_library
from tests.workers import run_workers

MODES: list[dict[str, Any]] = [{"parameters": "reshard", "verify": "checksum"}, {"parameters": "resident", "interface": "cable0"}]


def _on_machines(rank: int, world_size: int, folder: str, relays: bool) -> dict[str, Any]:
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    made: list[FileArena] = []
    told: list[Any] = []
    flushed: list[Any] = []

    def needs_relay(device: torch.device, name: str, read_by_mates: bool) -> bool:
        told.append((name, read_by_mates))
        return relays

    with pytest.MonkeyPatch.context() as patch:
        play_library(patch, rank, Path(folder), made)
        patch.setattr("primus_odc.fsdp.preparation.resolve_transport", lambda config, device_type, machines: {2: "nvshmem"}[machines])
        patch.setattr(memory, "prepare_environment", lambda name, **given: told.append((given["machines"], given["interface"])))
        patch.setattr(memory, "needs_relay", needs_relay)
        patch.setattr(memory, "flush_writes", lambda device: flushed.append(device))
        errors = [check_gradients(tiny_model, COUNTS[4], options) for options in MODES]
        engine = primus_odc.attach(shard(tiny_model()))
        nodes = engine._plane.t.nodes
        assert nodes is not None
        engine.detach()
        with pytest.raises(ConfigError, match="ranks_per_node: 4 puts global ranks 0 and 2, which run on different machines"):
            primus_odc.attach(shard(tiny_model()), ranks_per_node=4)
        return {"errors": errors, "members": nodes.members, "told": told, "puts": len(made[0].puts), "flushed": len(flushed)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("relays", [False, True], ids=["mates-look", "relayed"])
def test_an_engine_on_two_machines(tmp_path: Path, relays: bool) -> None:
    with two_hosts() as hosts:
        first = partial(_move, hosts)
        outcomes = run_workers(_on_machines, 4, str(tmp_path), relays, timeout_s=100, first=first)
    for rank, outcome in enumerate(outcomes):
        assert max(outcome["errors"]) <= 1e-6, outcome
        assert outcome["members"] == ((0, 1), (2, 3)) and outcome["puts"] > 0 and (outcome["flushed"] > 0) is relays
        # The library is started once; every memory asks for the order of writes.
        assert outcome["told"][0] == (2, "cable0") and set(outcome["told"][1:]) == {(f"rank {rank}", True)}


def _move(hosts: list[str], rank: int) -> None:
    move_to_machine(rank, hosts, 2)
