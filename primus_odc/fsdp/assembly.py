"""What an engine shares with the other ranks: the heap, and the data plane and protocol of one node or of several."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from primus_odc.config import OdcConfig
from primus_odc.fsdp.choices import RING_SLOTS, Choices, memory_of, nodes_of
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.node_plane import TwoLevelPlane
from primus_odc.primitives.nodes import Across
from primus_odc.primitives.plane import ArenaPlane, Fill
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.spec import GroupSpec, far_word_counts, plan_arena, word_counts
from primus_odc.primitives.topology import Topology
from primus_odc.primitives.two_level import TwoLevelProtocol
from primus_odc.symmetric.bootstrap import meet, store_address
from primus_odc.symmetric.heap import MakeMemory, SymmetricHeap
from primus_odc.symmetric.links import Machines
from primus_odc.symmetric.shmem.extension import Library
from primus_odc.symmetric.shmem.network import LibraryMemory
from primus_odc.symmetric.symm_mem import DeviceMemory


@dataclass(frozen=True)
class Assembly:
    """``memory``: bytes the engine adds to this rank, by purpose (:func:`primus_odc.fsdp.choices.memory_of`)."""

    heap: SymmetricHeap
    plane: ArenaPlane
    protocol: RankProtocol
    memory: dict[str, int]


def assemble(
    config: OdcConfig,
    choices: Choices,
    mesh: Mesh,
    groups: Sequence[GroupSpec],
    device: torch.device,
    *,
    read_shard_of: Callable[[int, int], torch.Tensor],
    reshard: Callable[[], None],
    deliver: Callable[[int, Fill], None],
    direct: Callable[[int], torch.Tensor | None],
) -> Assembly:
    """Make them (collective over the mesh); the last four arguments are those of :class:`ArenaPlane`. Who cannot tells the others."""
    mode, verify, nodes = choices.accumulate, config.verify == "checksum", nodes_of(config, mesh)
    across = nodes.across if nodes is not None else Across()
    plan = plan_arena(groups, mode, RING_SLOTS, device, across)
    topology = Topology(mesh.rank, mesh.world_size, mesh.peers, mesh.owners, [g.name for g in groups], mesh.names, nodes)
    make_memory, machines = span(config, choices, mesh, topology, device)
    heap = SymmetricHeap(
        mesh.rank,
        mesh.names,
        plan,
        word_counts(len(groups), mode, mesh.world_size, mesh.shards, RING_SLOTS, across),
        mesh.exchange,
        config.timeout_s,
        make_memory,
        far_words=far_word_counts(len(groups), across),
        machines=machines,
    )
    memory = memory_of(groups, mode, choices.transport, device, across, verify=verify)
    calls: dict[str, Any] = {"read_shard_of": read_shard_of, "reshard": reshard, "deliver": deliver, "direct": direct}
    try:
        if nodes is None:
            plane = ArenaPlane(heap, topology, groups, mode=mode, slots=RING_SLOTS, verify=verify, **calls)
            return Assembly(heap, plane, RankProtocol(topology, plane, mode, RING_SLOTS), memory)
        far = TwoLevelPlane(heap, topology, groups, verify=verify, **calls)
        return Assembly(heap, far, TwoLevelProtocol(topology, far), memory)
    except BaseException as error:
        heap.abort(f"attach: {error}")
        heap.close(goodbye=False)
        raise


def span(
    config: OdcConfig, choices: Choices, mesh: Mesh, topology: Topology, device: torch.device
) -> tuple[MakeMemory | None, Machines | None]:
    """Where the arenas lie (None: in host memory), and the machines over which they are spread (None: one); collective over the mesh."""
    if choices.transport == "nvshmem" or choices.transport == "mori":
        return _span_by_library(choices.transport, config, mesh, topology, device)

    def make_memory(nbytes: int, words: Mapping[int, torch.Tensor], far_words: int) -> DeviceMemory:
        group, places = mesh.heap_group()
        written = {r: block for r, block in words.items() if r == mesh.rank or r not in topology.near}
        return DeviceMemory(nbytes, mesh.rank, group, places, device, written)

    return (make_memory if choices.transport == "symm_mem" else None), None


def _span_by_library(
    library: Library, config: OdcConfig, mesh: Mesh, topology: Topology, device: torch.device
) -> tuple[MakeMemory, Machines | None]:
    # In the job's store a place of this engine's own: what an earlier one left there must not be taken for this one's.
    store = PrefixStore(f"primus_odc/{mesh.exchange(secrets.token_hex(8))[0]}", _get_default_store())
    nodes = [topology.nodes.node_of[r] if topology.nodes is not None else 0 for r in range(mesh.world_size)]
    address, interface = "127.0.0.1", config.interface
    if len(set(mesh.machines)) > 1:
        ways = PrefixStore("links", store)
        place = meet(ways, mesh.names, mesh.rank, interface=interface, store_address=store_address(), timeout_s=config.timeout_s)[mesh.rank]
        address, interface = place.address, place.interface

    def make_memory(nbytes: int, words: Mapping[int, torch.Tensor], far_words: int) -> LibraryMemory:
        return LibraryMemory(
            library,
            nbytes,
            far_words,
            mesh.rank,
            [sorted(mesh.global_ranks).index(r) for r in mesh.global_ranks],
            mesh.names,
            nodes,
            store,
            device,
            words[mesh.rank],
            timeout_s=config.timeout_s,
            interface=interface,
            nic=config.nic,
        )

    return make_memory, Machines(nodes, address) if topology.nodes is not None else None
