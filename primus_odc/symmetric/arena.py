"""Sizes and offsets of everything one rank shares, fixed before any memory is allocated.

One arena per rank, the same layout on all ranks, nothing allocated later: there is no heap size to guess and no collective
allocation in the middle of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ALIGNMENT = 256  # bytes; a multiple of the cache line and of what copy engines and vectorised kernels want


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round ``nbytes`` up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Region:
    """A named range of the arena, in bytes from its start."""

    offset: int
    nbytes: int


@dataclass
class ArenaPlan:
    """Append-only plan of an arena; ``regions`` maps a name to its range and ``nbytes`` is the arena's size."""

    regions: dict[str, Region] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, nbytes: int) -> Region:
        """Reserve ``nbytes`` (may be 0) under ``name``, aligned to :data:`ALIGNMENT`."""
        if name in self.regions:
            raise ValueError(f"region {name!r} exists already")
        region = Region(self.nbytes, nbytes)
        self.regions[name] = region
        self.nbytes += align(nbytes)
        return region
