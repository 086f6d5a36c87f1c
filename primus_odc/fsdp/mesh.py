"""Which ranks share a model, read from its parameters' device mesh.

FSDP2 places every parameter on a 1-D mesh (shard) or a 2-D mesh (replicate, shard: HSDP). The *shard index* that counts is the rank
inside the mesh dimension's process group, which is what FSDP2 itself uses; it differs from the mesh coordinate on permuted meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from primus_odc.errors import PeerError, UnsupportedModelError
from primus_odc.symmetric.bootstrap import host_id


@dataclass(frozen=True)
class Mesh:
    """The ranks of one sharded model.

    Heap rank = replica * shards + shard index. ``global_ranks[heap rank]`` is the rank in the default process group, and
    ``machines[heap rank]`` tells its machine from others.
    """

    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    shards: int
    replicas: int
    shard_index: int
    replica: int
    global_ranks: tuple[int, ...]
    machines: tuple[str, ...]

    @property
    def rank(self) -> int:
        return self.replica * self.shards + self.shard_index

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards

    @property
    def peers(self) -> tuple[int, ...]:
        """Heap ranks of this rank's shard group, in shard order."""
        return tuple(self.replica * self.shards + j for j in range(self.shards))

    @property
    def owners(self) -> tuple[int, ...]:
        """Heap ranks that own the same shard as this one, itself included, in replica order."""
        return tuple(replica * self.shards + self.shard_index for replica in range(self.replicas))

    @property
    def names(self) -> list[str]:
        """How the ranks are called in messages."""
        return [f"rank {r}" for r in self.global_ranks]

    def heap_group(self) -> tuple[dist.ProcessGroup, list[int]]:
        """A process group of all ranks of the mesh, and the place in it of every heap rank (collective over them)."""
        if self.replicate_group is None:
            return self.shard_group, list(range(self.shards))
        ordered = sorted(self.global_ranks)
        group = dist.new_group(ordered, use_local_synchronization=True)
        return group, [ordered.index(r) for r in self.global_ranks]

    def exchange(self, value: Any) -> list[Any]:
        """All-gather one picklable object over all ranks of the mesh, in heap-rank order (collective)."""
        return exchange(value, self.shard_group, self.replicate_group)

    @contextmanager
    def together(self, operation: str) -> Iterator[None]:
        """What is done inside calls no collective and may fail on some ranks only (collective at its end).

        Raises:
            PeerError: it did so on another rank; its text names that and the reason.
        """
        try:
            yield
        except Exception as error:
            self.exchange(str(error) or type(error).__name__)
            raise
        failed = [f"{name}: {text}" for name, text in zip(self.names, self.exchange(None), strict=True) if text is not None]
        if failed:
            raise PeerError(f"{self.names[self.rank]}: {operation} failed elsewhere: {'; '.join(failed)}")


def exchange(value: Any, shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup | None) -> list[Any]:
    """All-gather over a shard group, then over the replicas: shard order inside, replica order outside."""
    row: list[Any] = [None] * shard_group.size()
    dist.all_gather_object(row, value, group=shard_group)
    if replicate_group is None:
        return row
    rows: list[Any] = [None] * replicate_group.size()
    dist.all_gather_object(rows, row, group=replicate_group)
    return [item for r in rows for item in r]


def find_mesh(model: nn.Module) -> Mesh:
    """The one mesh all parameters of ``model`` are sharded over (collective over its ranks).

    Raises:
        UnsupportedModelError: the model is not sharded by FSDP2, or in a way the engine cannot serve, with every reason.
    """
    if not any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UnsupportedModelError("the model has no FSDP2 module: call torch.distributed.fsdp.fully_shard on it before attach()")
    problems: list[str] = []
    meshes = set()
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            problems.append(f"parameter {name} is not sharded: shard the root module with fully_shard too, without ignored_params")
            continue
        meshes.add(p.device_mesh)
        hsdp = p.device_mesh.ndim == 2 and isinstance(p.placements[0], Replicate)
        if p.device_mesh.ndim > 2 or (p.device_mesh.ndim == 2 and not hsdp) or type(p.placements[-1]) is not Shard:
            problems.append(
                f"parameter {name} has placements {p.placements} on a {p.device_mesh.ndim}-D mesh: only (Shard,) and (Replicate, Shard) "
                "are served, i.e. FSDP or HSDP without tensor, expert or pipeline parallelism"
            )
        if p.is_meta:
            problems.append(f"parameter {name} is on the meta device: materialise the model (to_empty, then load or initialise) first")
    if len(meshes) > 1:
        problems.append(f"parameters lie on {len(meshes)} different device meshes; the engine serves one")
    if not meshes and not problems:
        problems.append("the model has no parameters")
    if problems:
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UnsupportedModelError("this model cannot be driven on demand:\n" + "\n".join(f"  - {p}" for p in problems[:8]) + more)
    mesh = meshes.pop()
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    me = (shard_group.rank(), replicate_group.rank() if replicate_group is not None else 0, dist.get_rank(), host_id())
    cards = exchange(me, shard_group, replicate_group)
    shards = shard_group.size()
    for position, (shard_index, replica, global_rank, _) in enumerate(cards):
        if (replica, shard_index) != divmod(position, shards):
            raise UnsupportedModelError(
                f"rank {global_rank} is shard {shard_index} of its shard group, but its replica group holds another shard of the model at "
                f"its place {divmod(position, shards)}: torch sorts the ranks of a process group, so the rows and columns of a 2-D device "
                "mesh must be in ascending order of rank"
            )
    return Mesh(
        shard_group=shard_group,
        replicate_group=replicate_group,
        shards=shards,
        replicas=len(cards) // shards,
        shard_index=me[0],
        replica=me[1],
        global_ranks=tuple(c[2] for c in cards),
        machines=tuple(c[3] for c in cards),
    )
