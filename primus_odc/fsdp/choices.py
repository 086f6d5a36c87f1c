"""What ``auto`` means: transport, accumulate and parameters decided by memory, the same on every rank.

Each rank works out what it could afford; the ranks then take the poorest one's answer, so that all run the same mode, and the choice is
logged with its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from primus_odc.config import OdcConfig
from primus_odc.errors import ConfigError
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.nodes import Across, Nodes, group_into_nodes
from primus_odc.primitives.spec import GroupSpec, memory_bytes
from primus_odc.symmetric.host import available_memory

RING_SLOTS = 4
"""Pieces a source may have under way to one owner (``accumulate: owner``)."""
FREE_SHARE = 0.5
"""Without ``memory_budget_gib``, ``auto`` may spend this share of a rank's free memory."""

GIB = 2**30

Transport = Literal["host", "symm_mem"]


@dataclass(frozen=True)
class Choices:
    """The resolved options, equal on all ranks; ``reason`` explains what ``auto`` decided."""

    transport: Transport
    accumulate: Literal["local", "owner"]
    parameters: Literal["reshard", "resident"]
    nodes: int
    reason: str


def resolve_transport(config: OdcConfig, device_type: str) -> Transport:
    """The transport for tensors on ``device_type``; one that cannot be used is refused, nothing is replaced silently.

    Raises:
        ConfigError: naming the transport, the device and what to set.
    """
    if config.transport in ("nvshmem", "mori"):
        raise ConfigError(
            [
                f"odc.transport: {config.transport} is not part of this version; 'host' (CPU tensors) and 'symm_mem' (GPUs), both on one "
                "node, are. Set odc.transport: auto"
            ]
        )
    fitting: Transport = "host" if device_type == "cpu" else "symm_mem"
    if device_type not in ("cpu", "cuda"):
        raise ConfigError([f"odc.transport: no transport reaches tensors on {device_type}; CPU and CUDA or ROCm devices are served"])
    if config.transport not in ("auto", fitting):
        raise ConfigError(
            [f"odc.transport: {config.transport} does not reach tensors on {device_type}; set odc.transport: {fitting} (or auto) there"]
        )
    return fitting


def describe(choices: Choices, mesh: Mesh, groups: int, memory: Mapping[str, int]) -> str:
    """What a rank logs when it has attached; ``memory`` as of :func:`primus_odc.primitives.spec.memory_bytes`."""
    modes = f"transport {choices.transport}, accumulate {choices.accumulate}, parameters {choices.parameters}"
    parts = ", ".join(f"{purpose} {nbytes / GIB:.3f}" for purpose, nbytes in memory.items())
    return (
        f"attached {groups} groups over {mesh.shards} shards x {mesh.replicas} replicas: {modes}; adds "
        f"{sum(memory.values()) / GIB:.3f} GiB a rank ({parts}); {choices.reason}"
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


def nodes_of(config: OdcConfig, mesh: Mesh) -> Nodes | None:
    """The nodes among which the ranks of ``mesh`` are spread; None: they share one."""
    return group_into_nodes(mesh.global_ranks, config.ranks_per_node, mesh.shards)


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
    local = sum(memory_bytes(groups, "local", RING_SLOTS, device, across, verify=verify).values())
    owner = sum(memory_bytes(groups, "owner", RING_SLOTS, device, verify=verify).values())
    resident = sum(g.shards * g.shard_nbytes for g in groups)
    accumulate: Literal["local", "owner"]
    if config.accumulate == "auto":
        accumulate = "local" if config.deterministic or nodes is not None or local <= budget else "owner"
    else:
        accumulate = config.accumulate
    spent = local if accumulate == "local" else owner
    parameters: Literal["reshard", "resident"]
    if config.parameters == "auto":
        parameters = "resident" if spent + resident <= budget else "reshard"
    else:
        parameters = config.parameters
    other = f"owner {owner / GIB:.3f}" if nodes is None else "which is the only mode across nodes"
    reason = (
        f"budget {budget / GIB:.3f} GiB a rank ({source}); local needs {local / GIB:.3f}, {other}, resident parameters "
        f"{resident / GIB:.3f} more"
    )
    return Choices(transport, accumulate, parameters, nodes.count if nodes is not None else 1, reason)
