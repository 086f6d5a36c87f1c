"""Engines on two machines: processes in two network namespaces, gloo between them over the cable, and a stand-in for the other machine's
memory (:mod:`tests.symmetric.far_memory`) in place of the device memory and network of a real transport."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from primus_odc.config import OdcConfig
from primus_odc.fsdp import assembly, preparation
from primus_odc.fsdp.choices import Choices, Transport
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.topology import Topology
from primus_odc.symmetric.bootstrap import meet
from primus_odc.symmetric.heap import MakeMemory
from primus_odc.symmetric.links import Machines
from tests.symmetric.far_memory import in_files
from tests.symmetric.hosts import ADDRESSES, move_to


def move_to_machine(rank: int, hosts: Sequence[str], ranks_per_node: int) -> None:
    """Before the process group is made: go to the machine of ``rank``, and let gloo use the cable."""
    move_to(hosts[rank // ranks_per_node])
    os.environ["GLOO_SOCKET_IFNAME"] = "cable0"


def engines_on_machines(folder: Path, world_size: int, *, hides: bool = False) -> None:
    """From here on every engine of this process whose ranks are spread over nodes takes those for machines; ``folder`` is shared.
    ``hides``: what arrives is seen by nobody before its owner makes it visible (:class:`tests.symmetric.far_memory.FileNetwork`)."""
    numbers = itertools.count()

    def span(
        config: OdcConfig, choices: Choices, mesh: Mesh, topology: Topology, device: torch.device
    ) -> tuple[MakeMemory | None, Machines | None]:
        assert choices.transport == "host" and topology.nodes is not None
        name = f"engine.{next(numbers)}.{'-'.join(map(str, mesh.global_ranks))}"
        (folder / name).mkdir(exist_ok=True)
        store = dist.PrefixStore(name, dist.FileStore(str(folder / "meeting"), world_size))
        places = meet(store, mesh.names, mesh.rank, interface="cable0", store_address=(ADDRESSES[0], 1), timeout_s=30)
        nodes = [topology.nodes.node_of[r] for r in range(mesh.world_size)]
        return in_files(folder / name, nodes, mesh.rank, mesh.exchange, hides=hides), Machines(nodes, places[mesh.rank].address)

    def on_the_host(config: OdcConfig, device_type: str, machines: int = 1) -> Transport:
        return "host"  # which would refuse two machines

    assembly.span = span
    preparation.resolve_transport = on_the_host
