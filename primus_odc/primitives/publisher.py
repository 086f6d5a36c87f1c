"""What publish copies: this rank's parameter shards into its arena, all groups' in one launch for each pair of dtypes.

The host's part is small on purpose: publish stands between two steps, and what the host is ahead of its device there is all that hides its
work at the start of the next one. Destinations are cut once; the shards are looked up before a rank waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from primus_odc._words import counted
from primus_odc.errors import ProtocolError
from primus_odc.primitives.spec import GroupSpec

ReadShard = Callable[[int, int], torch.Tensor]
"""(group, parameter) -> this rank's local shard, any shape, the parameter's own dtype."""


def require_dtypes(parameters: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Refuse ``parameters`` (name, dtype at attach, dtype now) that were cast since.

    Raises:
        ProtocolError: naming the first, and how many.
    """
    if changed := [f"{name} ({before} is {now})" for name, before, now in parameters if before != now]:
        raise ProtocolError(
            f"the dtype of {counted(len(changed), 'parameter')} changed after attach(), of {changed[0]} first: FSDP2 has made its "
            "buffers for the old one; convert the model before fully_shard(), or load weights of the model's own dtype"
        )


class Publisher:
    """Copies of one rank. ``regions[g]``: uint8 ``[shard_nbytes]``, where the shard of group g is published; nothing is of a group whose
    shard group has one rank, from which nobody gathers."""

    def __init__(self, groups: Sequence[GroupSpec], regions: Sequence[torch.Tensor], read_shard_of: ReadShard) -> None:
        self._groups = groups
        self._read_shard_of = read_shard_of
        self._places = [_places(g, region) if g.shards > 1 else [] for g, region in zip(groups, regions, strict=True)]
        self._found: dict[int, list[torch.Tensor]] = {}
        self._dtypes: dict[int, list[torch.dtype]] = {}
        self._batches: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @torch.no_grad()
    def look_up(self) -> None:
        """Find the shards that are copied next; all groups must be resharded, and stay so.

        Raises:
            ProtocolError: parameters have another dtype than the first time.
        """
        self._found = {g: self._shards(g) for g, places in enumerate(self._places) if places}
        dtypes = {g: [shard.dtype for shard in shards] for g, shards in self._found.items()}
        self._dtypes = self._dtypes or dtypes
        if dtypes != self._dtypes:
            require_dtypes(
                (p.name, before, now)
                for g, found in dtypes.items()
                for p, before, now in zip(self._groups[g].params, self._dtypes[g], found, strict=True)
            )

    @torch.no_grad()
    def add(self, group: int) -> None:
        """The next :meth:`copy` copies the shard of ``group`` too."""
        if self._places[group]:
            self._add(group, self._places[group], self._found.pop(group, []) or self._shards(group))

    @torch.no_grad()
    def copy(self) -> None:
        """Give the current stream the copies of all groups added."""
        for places, values in self._batches.values():
            torch._foreach_copy_(places, values)
        self._batches.clear()

    def copy_to(self, group: int, region: torch.Tensor) -> None:
        """Copy what would be published of ``group`` to ``region`` instead; nothing may be added and not copied."""
        self._add(group, _places(self._groups[group], region), self._shards(group))
        self.copy()

    def _shards(self, group: int) -> list[torch.Tensor]:
        return [self._read_shard_of(group, i).reshape(-1) for i in range(len(self._groups[group].params))]

    def _add(self, group: int, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for p, place, value in zip(self._groups[group].params, places, values, strict=True):
            cast = value.to(p.gather_dtype).view(torch.uint8) if place.dtype != p.gather_dtype else value
            batch = self._batches.setdefault((place.dtype, cast.dtype), ([], []))
            batch[0].append(place)
            batch[1].append(cast)


def _places(group: GroupSpec, region: torch.Tensor) -> list[torch.Tensor]:
    """Where each parameter goes: in its gather dtype, or as bytes where it stands behind parameters of a narrower one."""
    places = []
    for p in group.params:
        place = region[p.shard_offset : p.shard_offset + p.local_numel * p.gather_dtype.itemsize]
        places.append(place if p.shard_offset % p.gather_dtype.itemsize else place.view(p.gather_dtype))
    return places
