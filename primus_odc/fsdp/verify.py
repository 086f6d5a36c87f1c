"""``odc.verify: reference``: every published shard and every settled gradient compared with what collectives give.

Ranks gather and reduce at their own pace, so the comparison happens where all of them meet anyway: after publish and inside settle. It
costs a full collective pass and one more unsharded gradient buffer per rank; it is a tool for finding a fault, not a mode to train in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from primus_odc.errors import VerificationError
from primus_odc.fsdp.gather import Into
from primus_odc.fsdp.mesh import Mesh
from primus_odc.fsdp.native import all_gather_single
from primus_odc.primitives.contribution import Contribution, UnshardedSum
from primus_odc.primitives.spec import GroupSpec

GRADIENT_TOLERANCE = 1e-5
"""Largest relative L2 difference between on-demand and collective sums: both add fp32 numbers, in different orders."""


class ReferenceCheck:
    """Mirrors what the engine does, through collectives (public ``torch.distributed`` calls)."""

    def __init__(self, mesh: Mesh, groups: Sequence[GroupSpec], device: torch.device) -> None:
        self._mesh = mesh
        self._groups = groups
        self._sums = [UnshardedSum(g, torch.zeros(g.shards, g.grad_numel, dtype=g.sum_dtype, device=device)) for g in groups]

    def add(self, group: int, contribution: Contribution) -> None:
        self._sums[group].add(contribution)

    def publication(self, read: Callable[[int, Into], None], own_shard: Callable[[int], torch.Tensor], epoch: int) -> None:
        """Compare all groups' shards, as ``read(group, into)`` reads them on demand in stream order, with the all-gather of
        ``own_shard(group)``."""
        for g, spec in enumerate(self._groups):
            if spec.shards > 1:
                own = own_shard(g)
                gathered = own.new_empty(spec.shards, spec.shard_nbytes)
                read(g, lambda owner, rows=gathered, n=spec.shard_nbytes: [(0, n, rows[owner % self._mesh.shards])])  # type: ignore[misc]
                self._compare(g, own, gathered, epoch)

    def _compare(self, group: int, own: torch.Tensor, gathered: torch.Tensor, epoch: int) -> None:
        reference = torch.empty_like(gathered)
        all_gather_single(reference.view(-1), own.contiguous(), group=self._mesh.shard_group)
        wrong = [self._mesh.names[self._mesh.peers[j]] for j in range(gathered.shape[0]) if not torch.equal(reference[j], gathered[j])]
        if wrong:
            raise VerificationError(
                f"{self._mesh.names[self._mesh.rank]}: shards of group {self._groups[group].name} read on demand from {wrong} differ from "
                f"the all-gather's in epoch {epoch}"
            )

    def gradients(self, group: int, total: torch.Tensor, epoch: int) -> None:
        """``total``: the settled gradient shard, ``[grad_numel]``; infinities and NaNs of the model's own must be in the same places."""
        self._sums[group].complete()
        reference = self._sums[group].buffer.to(torch.float64)
        dist.all_reduce(reference, group=self._mesh.shard_group)
        if self._mesh.replicate_group is not None:
            dist.all_reduce(reference, group=self._mesh.replicate_group)
        # What only fp64 can hold is infinite in the sum's dtype.
        mine = reference[self._mesh.shard_index].to(total.dtype).to(torch.float64)
        theirs = total.to(torch.float64)
        alike = (theirs == mine) | (theirs.isnan() & mine.isnan())
        difference = float(torch.linalg.vector_norm((theirs - mine).masked_fill(alike, 0.0)))
        norm = float(torch.linalg.vector_norm(mine.nan_to_num(0.0, 0.0, 0.0)))
        if not difference <= GRADIENT_TOLERANCE * norm:
            raise VerificationError(
                f"{self._mesh.names[self._mesh.rank]}: gradients of group {self._groups[group].name} differ from the collective sum by "
                f"{difference:.3e} (norm {norm:.3e}) in epoch {epoch}"
            )
