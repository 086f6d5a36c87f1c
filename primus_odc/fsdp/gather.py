"""The all-gather object of one communication unit: reads the owners' published shards instead of calling a collective.

FSDP2 hands over the whole output with this rank's own shard already in place. Two forms arrive:

* the unit is sharded: one row per rank of the shard group, row o being owner o's shard;
* the unit was resharded to a smaller group after forward (``reshard_after_forward=int``): one row per rank of that group, row j being,
  for each parameter in turn, the j-th of equal slices of its padded flat data, i.e. a run of consecutive owners' shards. It is served
  from the same published shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from primus_odc.errors import ProtocolError
from primus_odc.fsdp.native import OrdinaryMemory
from primus_odc.primitives.spec import GroupSpec

if TYPE_CHECKING:
    from primus_odc.fsdp.engine import Engine
    from primus_odc.fsdp.probe import Unit

Destination = tuple[int, int, torch.Tensor]
"""``(start byte, stop byte, where)``: this part of an owner's shard goes there (uint8, same length)."""
Into = Callable[[int], list[Destination]]
"""Heap rank of an owner -> where the parts of its shard go."""


class OnDemandAllGather(OrdinaryMemory):
    """Implements torch's ``AllGather`` interface (``FSDPModule.set_custom_all_gather``), duck-typed."""

    def __init__(self, engine: Engine, group: int, spec: GroupSpec) -> None:
        self._engine = engine
        self._group = group
        self._spec = spec
        self._output: Callable[[], torch.Tensor | None] = lambda: None
        self._dropping = False

    def drop(self, unit: Unit) -> None:
        """Have FSDP2 forget a gather of ``unit`` that was begun, by ``unshard(async_op=True)`` or a prefetch, and never waited for.

        It would make the parameters of a later epoch of it. They may be unsharded afterwards.

        FSDP2 holds the output until then, and that of the last unit of a forward a little longer: there nothing is gathered in vain.
        """
        if self._output() is None or not unit.is_sharded():
            return
        self._dropping = True
        try:
            unit.finish_unshard()
        finally:
            self._dropping = False

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        if self._dropping:
            return
        self._output = weakref.ref(output_tensor)
        rows = output_tensor.view(group.size(), -1).view(torch.uint8)
        if group.size() == self._spec.shards:
            spec = self._spec
            self._engine.gather(
                self._group, lambda owner: [(0, spec.shard_nbytes, rows[owner % spec.shards])], own=input_tensor.view(torch.uint8)
            )
        else:
            self._engine.gather(self._group, regrouped(self._spec, rows, group.rank()), own=None)


def regrouped(spec: GroupSpec, rows: torch.Tensor, own_row: int) -> Into:
    """Destinations in ``rows`` (``[ranks of the smaller group, bytes]``) of each owner's shard, except in ``own_row``.

    Raises:
        ProtocolError: the output is not a regrouping of this unit's shards.
    """
    small, nbytes = rows.shape
    if spec.shards % small or nbytes * small != spec.shard_nbytes * spec.shards:
        raise ProtocolError(
            f"group {spec.name}: FSDP2 asks for {small} rows of {nbytes} bytes, which are not made of {spec.shards} shards of "
            f"{spec.shard_nbytes} bytes"
        )
    span = spec.shards // small  # consecutive owners behind one row

    def into(owner: int) -> list[Destination]:
        row, place = divmod(owner % spec.shards, span)
        if row == own_row:
            return []
        destinations = []
        for p in spec.params:
            start = p.shard_offset * span + place * p.shard_nbytes
            destinations.append((p.shard_offset, p.shard_offset + p.shard_nbytes, rows[row, start : start + p.shard_nbytes]))
        return destinations

    return into
