"""What ``auto`` means: transport, accumulate and parameters decided by memory, the same on every rank.

Each rank works out what it could afford; the ranks then take the poorest one's answer, so that all run the same mode, and the choice is
logged with its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from primus_odc.config import OdcConfig
from primus_odc.errors import ConfigError
from primus_odc.fsdp.mesh import Mesh
from primus_odc.primitives.spec import GroupSpec, memory_bytes
from primus_odc.symmetric.host import available_memory

RING_SLOTS = 4
"""Pieces a source may have under way to one owner (``accumulate: owner``)."""
FREE_SHARE = 0.5
"""Without ``memory_budget_gib``, ``auto`` may spend this share of the free memory, divided by the ranks of the host."""

GIB = 2**30


@dataclass(frozen=True)
class Choices:
    """The resolved options, equal on all ranks; ``reason`` explains what ``auto`` decided."""

    transport: Literal["host"]
    accumulate: Literal["local", "owner"]
    parameters: Literal["reshard", "resident"]
    reason: str


def require_available_transport(config: OdcConfig, device_type: str) -> None:
    """Refuse a transport this version or this device cannot use; nothing is replaced silently.

    Raises:
        ConfigError: naming the transport, the device and what to set.
    """
    if config.transport not in ("auto", "host"):
        raise ConfigError(
            [
                f"odc.transport: {config.transport} is not part of this version; 'host' (CPU tensors of one machine) is. Set "
                "odc.transport: auto"
            ]
        )
    if device_type != "cpu":
        raise ConfigError(
            [
                f"odc.transport: {config.transport} reaches CPU tensors only in this version and the model is on {device_type}; move the "
                "model to the CPU or set comm_backend: nccl_pad"
            ]
        )


def choose(config: OdcConfig, groups: Sequence[GroupSpec], mesh: Mesh) -> Choices:
    """Resolve ``auto`` (collective over the mesh)."""
    if config.memory_budget_gib is not None:
        budget = config.memory_budget_gib * GIB
        source = f"odc.memory_budget_gib = {config.memory_budget_gib:g}"
    else:
        budget = FREE_SHARE * available_memory() / mesh.world_size
        source = f"{FREE_SHARE:.0%} of the free memory, divided by {mesh.world_size} ranks"
    budget = min(mesh.exchange(budget))
    verify = config.verify == "checksum"
    local = sum(memory_bytes(groups, "local", RING_SLOTS, verify=verify).values())
    owner = sum(memory_bytes(groups, "owner", RING_SLOTS, verify=verify).values())
    resident = sum(g.shards * g.shard_nbytes for g in groups)
    accumulate: Literal["local", "owner"]
    if config.accumulate == "auto":
        accumulate = "local" if config.deterministic or local <= budget else "owner"
    else:
        accumulate = config.accumulate
    spent = local if accumulate == "local" else owner
    parameters: Literal["reshard", "resident"]
    if config.parameters == "auto":
        parameters = "resident" if spent + resident <= budget else "reshard"
    else:
        parameters = config.parameters
    reason = (
        f"budget {budget / GIB:.3f} GiB a rank ({source}); local needs {local / GIB:.3f}, owner {owner / GIB:.3f}, resident parameters "
        f"{resident / GIB:.3f} more"
    )
    return Choices("host", accumulate, parameters, reason)
