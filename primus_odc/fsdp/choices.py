"""What ``auto`` means: transport, accumulate and parameters decided by memory, the same on every rank.

Each rank works out what it could afford; the ranks then take the poorest one's answer, so that all run the same mode, and the choice is
logged with its figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from primus_odc.config import OdcConfig
from primus_odc.errors import ConfigError, OdcError, UnsupportedModelError
from primus_odc.fsdp.mesh import Mesh
from primus_odc.fsdp.own import lack_room
from primus_odc.fsdp.probe import Unit
from primus_odc.primitives.nodes import Across, Nodes, group_into_nodes
from primus_odc.primitives.spec import GroupSpec, layout_digest, memory_bytes, plan_arena
from primus_odc.symmetric.host import available_memory
from primus_odc.symmetric.shmem.environment import heap_overhead
from primus_odc.symmetric.shmem.extension import Library, load_extension

RING_SLOTS = 4
"""Pieces a source may have under way to one owner (``accumulate: owner``)."""
FREE_SHARE = 0.5
"""Without ``memory_budget_gib``, ``auto`` may spend this share of a rank's free memory."""

GIB = 2**30

Transport = Literal["host", "symm_mem"] | Library
LIBRARIES: tuple[Library, ...] = get_args(Library)
"""Transports that reach several machines."""


@dataclass(frozen=True)
class Choices:
    """The resolved options, equal on all ranks; ``reason`` explains what ``auto`` decided."""

    transport: Transport
    accumulate: Literal["local", "owner"]
    parameters: Literal["reshard", "resident"]
    nodes: int
    reason: str


def resolve_transport(config: OdcConfig, device_type: str, machines: int = 1) -> Transport:
    """The transport for tensors on ``device_type`` of ranks on so many ``machines``; one that cannot be used is refused, nothing is
    replaced silently.

    Raises:
        ConfigError: naming the transport, the device and what to set.
    """
    if device_type not in ("cpu", "cuda"):
        raise ConfigError([f"odc.transport: no transport reaches tensors on {device_type}; CPU and CUDA or ROCm devices are served"])
    on_cpu = device_type == "cpu"
    library: Library = "mori" if torch.version.hip is not None else "nvshmem"
    one_machine: Transport = "host" if on_cpu else "symm_mem"
    fitting = library if machines > 1 and not on_cpu else one_machine
    asked = fitting if config.transport == "auto" else config.transport
    if asked != one_machine and (on_cpu or asked not in LIBRARIES):
        raise ConfigError([f"odc.transport: {asked} does not reach tensors on {device_type}; set odc.transport: {fitting} (or auto) there"])
    if asked in LIBRARIES:
        reason = "" if config.transport == asked else f" (these ranks are on {machines} machines, which nothing else reaches)"
        _require_library(config, asked, library, reason)
    elif machines > 1:
        rest = "comm_backend: nccl_pad" if on_cpu else f"odc.transport: {library} (or auto)"
        raise ConfigError([f"odc.transport: {asked} reaches the ranks of one node and there are {machines}; set NNODES=1, or {rest}"])
    return asked


def _require_library(config: OdcConfig, asked: Library, library: Library, reason: str) -> None:
    """Refuse ``asked`` where this torch, this installation or the other keys do not go with it."""
    problems = []
    built = torch.version.cuda or torch.version.hip  # neither: a configuration is looked at on another machine than its own
    if built and asked != library:
        vendors = {"nvshmem": "NVIDIA", "mori": "AMD"}
        told = f"is for {vendors[asked]} GPUs, and this torch for {vendors[library]}"
        problems.append(f"odc.transport: {asked} {told}: set odc.transport: {library} (or auto)")
    if config.accumulate == "owner":
        problems.append(
            f"odc.transport: {asked}{reason} and odc.accumulate: owner, which would push every microbatch's gradients: set "
            "odc.accumulate: local (or auto)"
        )
    if not problems:
        try:
            load_extension(asked)
        except OdcError as error:
            problems.append(f"{error}{reason}")
    if problems:
        raise ConfigError(problems)


def describe(choices: Choices, mesh: Mesh, units: Sequence[Unit], memory: Mapping[str, int]) -> str:
    """What a rank logs when it has attached; ``memory`` as of :func:`memory_of`."""
    casts = "; FSDP2 casts this rank's shard for every gather, since parts of the model ran or got new tensors before attach()"
    modes = f"transport {choices.transport}, accumulate {choices.accumulate}, parameters {choices.parameters}"
    parts = ", ".join(f"{purpose} {nbytes / GIB:.3f}" for purpose, nbytes in memory.items())
    return (
        f"attached {len(units)} groups over {mesh.shards} shards x {mesh.replicas} replicas: {modes}; adds "
        f"{sum(memory.values()) / GIB:.3f} GiB a rank ({parts}); {choices.reason}"
        f"{casts if choices.parameters == 'reshard' and lack_room(units) else ''}"
    )


def free_memory(device: torch.device, ranks: int) -> tuple[int, str]:
    """Bytes one of ``ranks`` ranks of this host may count as free, and how to say so."""
    if device.type == "cpu":
        return available_memory() // ranks, f"free memory, divided by {ranks} ranks"
    return torch.cuda.mem_get_info(device)[0], f"free memory of {device}"


def choose(config: OdcConfig, transport: Transport, groups: Sequence[GroupSpec], mesh: Mesh, device: torch.device) -> Choices:
    """Resolve what is left to ``auto`` (collective over the mesh)."""
    budget, source = budget_of(config, lambda: free_memory(device, mesh.world_size))
    return decide(config, groups, transport, device, min(mesh.exchange(budget)), source, nodes_of(config, mesh))


def memory_of(
    groups: Sequence[GroupSpec], mode: str, transport: Transport, device: torch.device, across: Across, *, verify: bool
) -> dict[str, int]:
    """What the engine adds to one rank's memory, by purpose (bytes): :func:`memory_bytes`, and ``library``, what the heap of NVSHMEM or
    MORI takes beside the arena."""
    memory = memory_bytes(groups, mode, RING_SLOTS, device, across, verify=verify)
    if transport not in LIBRARIES:
        return memory
    arena = plan_arena(groups, mode, RING_SLOTS, device, across).nbytes
    return memory | {"library": heap_overhead(transport, arena, os.environ)}


def nodes_of(config: OdcConfig, mesh: Mesh) -> Nodes | None:
    """The nodes among which the ranks of ``mesh`` are spread; None: they share one."""
    return group_into_nodes(mesh.global_ranks, config.ranks_per_node, mesh.shards, mesh.machines)


def budget_of(config: OdcConfig, free: Callable[[], tuple[int, str]]) -> tuple[float, str]:
    """Bytes that ``auto`` may spend on one rank, and where the figure comes from; ``free`` is asked where the configuration names none."""
    if config.memory_budget_gib is not None:
        return config.memory_budget_gib * GIB, f"odc.memory_budget_gib = {config.memory_budget_gib:g}"
    nbytes, what = free()
    return FREE_SHARE * nbytes, f"{FREE_SHARE:.0%} of the {what}"


def decide(
    config: OdcConfig,
    groups: Sequence[GroupSpec],
    transport: Transport,
    device: torch.device,
    budget: float,
    source: str,
    nodes: Nodes | None = None,
) -> Choices:
    """The choices that follow from ``budget``, in bytes a rank, which comes from ``source``.

    Raises:
        ConfigError: what ``nodes`` do not allow.
    """
    if nodes is not None and config.accumulate == "owner":
        raise ConfigError(
            [
                f"odc.ranks_per_node: {config.ranks_per_node} spreads these ranks over {nodes.count} nodes, and odc.accumulate: owner "
                "would push every microbatch's gradients across them; there gradients are added up inside a node first and sent once a "
                "minibatch: set odc.accumulate: local (or auto)"
            ]
        )
    verify, across = config.verify == "checksum", nodes.across if nodes is not None else Across()
    local = sum(memory_of(groups, "local", transport, device, across, verify=verify).values())
    owner = sum(memory_bytes(groups, "owner", RING_SLOTS, device, verify=verify).values())
    resident = sum(g.shards * g.shard_nbytes for g in groups)
    accumulate: Literal["local", "owner"]
    alone = nodes is not None or transport in LIBRARIES
    if config.accumulate == "auto":
        accumulate = "local" if config.deterministic or alone or local <= budget else "owner"
    else:
        accumulate = config.accumulate
    spent = local if accumulate == "local" else owner
    parameters: Literal["reshard", "resident"]
    if config.parameters == "auto":
        parameters = "resident" if spent + resident <= budget else "reshard"
    else:
        parameters = config.parameters
    other = f"which is the only mode {'across nodes' if nodes is not None else 'of ' + transport}" if alone else f"owner {owner / GIB:.3f}"
    reason = (
        f"budget {budget / GIB:.3f} GiB a rank ({source}); local needs {local / GIB:.3f}, {other}, resident parameters "
        f"{resident / GIB:.3f} more"
    )
    return Choices(transport, accumulate, parameters, nodes.count if nodes is not None else 1, reason)


def require_agreement(config: OdcConfig, choices: Choices, mesh: Mesh, specs: Sequence[GroupSpec]) -> None:
    """Every rank must share the same layout in the same mode, or it would read and write in the wrong places (collective).

    Raises:
        UnsupportedModelError: naming the ranks that differ from the first.
    """
    options = (choices.transport, choices.accumulate, choices.parameters, choices.nodes, config.verify, config.timeout_s)
    digests = mesh.exchange(layout_digest(specs, options))
    differing = [mesh.names[r] for r, d in enumerate(digests) if d != digests[0]]
    if differing:
        raise UnsupportedModelError(
            f"{differing} have another model layout or other options than {mesh.names[0]}; every rank must attach the same model "
            "(parameters, requires_grad, sharding) with the same options"
        )
