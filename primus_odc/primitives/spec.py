"""Static description of what is shared: parameter groups, their shards and the arena they need.

Everything here is fixed at attach and equal on all ranks, except ``local_numel``/``local_shape`` (uneven shards). Nothing depends on
which parameters a microbatch happens to use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from primus_odc.primitives.nodes import Across
from primus_odc.symmetric.arena import ArenaPlan, align

PIECE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What pushed gradients may be: they travel as FSDP2 reduces them and are summed in the group's ``sum_dtype``."""
PIECE_WORDS = 6
"""Control words of a pushed piece's header: epoch, group, offset, number of elements, place of its dtype in the list above, checksum."""
_MAX_PIECE_BYTES_HOST = 1 << 22
_MAX_PIECE_BYTES_DEVICE = 1 << 26
"""On a device the cost of a transfer is that of its launch, and one launch a layer and owner is the least."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter's place in its group.

    ``padded_numel`` elements per shard (FSDP2 pads dim 0 to equal shards), of which the first ``local_numel`` are real on this rank,
    shaped ``local_shape``. The published shard holds them in ``gather_dtype`` from byte ``shard_offset``; the gradient shard, if the
    parameter is trainable, from element ``grad_offset``.
    """

    name: str
    trainable: bool
    gather_dtype: torch.dtype
    padded_numel: int
    local_shape: tuple[int, ...]
    shard_offset: int
    grad_offset: int

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)

    @property
    def shard_nbytes(self) -> int:
        return self.padded_numel * self.gather_dtype.itemsize


@dataclass(frozen=True)
class GroupSpec:
    """One FSDP2 communication unit.

    ``shard_nbytes`` bytes per published shard, ``grad_numel`` elements per gradient shard, both padding included. ``grad_dtype`` is
    that of ``.grad`` (the parameters' own), ``sum_dtype`` that in which gradients are summed: at least fp32.
    """

    name: str
    params: tuple[ParamSpec, ...]
    shards: int
    shard_nbytes: int
    grad_numel: int
    grad_dtype: torch.dtype
    sum_dtype: torch.dtype

    @property
    def grad_nbytes(self) -> int:
        return self.grad_numel * self.sum_dtype.itemsize

    def trainable(self) -> list[tuple[int, ParamSpec]]:
        """``(index, parameter)`` of the parameters that take part in gradients, in flat order."""
        return [(i, p) for i, p in enumerate(self.params) if p.trainable]


def layout_digest(groups: Sequence[GroupSpec], options: Sequence[object]) -> str:
    """SHA-256 over everything that must be equal on all ranks: names, sizes, dtypes, order and the engine's options."""
    text = repr(tuple(options))
    for g in groups:
        text += repr((g.name, g.shards, g.shard_nbytes, g.grad_numel, g.grad_dtype, g.sum_dtype))
        text += repr([(p.name, p.trainable, p.gather_dtype, p.padded_numel, p.shard_offset, p.grad_offset) for p in g.params])
    return hashlib.sha256(text.encode()).hexdigest()


def piece_bytes(groups: Sequence[GroupSpec], device: torch.device) -> int:
    """Bytes of one ring slot: the largest gradient shard, at most 4 MiB in host memory and 64 MiB on a device."""
    limit = _MAX_PIECE_BYTES_HOST if device.type == "cpu" else _MAX_PIECE_BYTES_DEVICE
    return align(min(max((g.grad_nbytes for g in groups), default=0), limit))


CHECKSUM_BYTES = 8
"""Behind every fan-out copy and staging slot, 8-byte aligned: what a reader of another node cannot look up at the writer."""


def announced_nbytes(groups: Sequence[GroupSpec], across: Across) -> int:
    """Bytes of the checksums that a rank sends behind its shard and its node's partials of every group: they are put from the arena, as all
    that a network takes."""
    return CHECKSUM_BYTES * sum(1 + g.shards for g in groups) if across.stagings else 0


def with_checksum(nbytes: int) -> int:
    """Bytes of a fan-out copy or staging slot of ``nbytes``; its checksum is the last word."""
    return align(nbytes, CHECKSUM_BYTES) + CHECKSUM_BYTES


_ONE_NODE = Across()


def memory_bytes(
    groups: Sequence[GroupSpec], mode: str, slots: int, device: torch.device, across: Across = _ONE_NODE, *, verify: bool = False
) -> dict[str, int]:
    """What the engine adds to one rank's memory, by purpose (bytes); the first five lie in the arena.

    ``shards``: published copies, 1/S of the parameters in the compute dtype. ``gradients``: in ``local`` mode the unsharded sum
    (S x gradient shard), in ``owner`` mode the accumulator (one gradient shard). ``ring``: slots for arrivals, ``owner`` mode only.
    ``fan_out``, ``staging``: across nodes only, see :class:`Across`; staging has the checksums beside what is sent too.
    ``own``: the sum of what this rank made of its own shards, ``owner`` mode only. ``grad``: the persistent ``.grad`` buffers. ``sum``: the
    finished sum of the largest group whose ``.grad`` has another dtype, and two gradient shards of the largest group with checksums.
    ``zeros``: what FSDP2 takes for its results, one gradient shard of the largest group of each dtype.

    Not in it, because it comes and goes: one gradient shard for the time of settle where gradients are added to what was not zeroed; sums
    kept for an owner that has no free slot (:mod:`primus_odc.primitives.pushes`).
    """
    gradients = sum(align(s) for s in _gradient_bytes(groups, mode))
    largest = max((g.grad_nbytes for g in groups), default=0)
    shards = max((g.shards for g in groups), default=1)
    zeros: dict[torch.dtype, int] = {}
    for g in groups:
        zeros[g.grad_dtype] = max(zeros.get(g.grad_dtype, 0), g.grad_numel * g.grad_dtype.itemsize)
    return {
        "shards": sum(align(g.shard_nbytes) for g in groups),
        "gradients": gradients,
        "ring": shards * slots * piece_bytes(groups, device) if mode == "owner" else 0,
        "fan_out": across.landings * sum(align(with_checksum(g.shard_nbytes)) for g in groups),
        "staging": across.stagings * sum(align(with_checksum(g.grad_nbytes)) for g in groups) + align(announced_nbytes(groups, across)),
        "own": sum(g.grad_nbytes for g in groups) if mode == "owner" else 0,
        "grad": sum(g.grad_numel * g.grad_dtype.itemsize for g in groups),
        "sum": cast_nbytes(groups) + (2 * largest if verify else 0),
        "zeros": sum(zeros.values()),
    }


def cast_nbytes(groups: Sequence[GroupSpec]) -> int:
    """Bytes of the largest sum that is cast before it is ``.grad``; 0 where gradients are summed in their own dtype."""
    return max((g.grad_nbytes for g in groups if g.grad_dtype != g.sum_dtype), default=0)


def _gradient_bytes(groups: Sequence[GroupSpec], mode: str) -> list[int]:
    return [g.grad_nbytes * (g.shards if mode == "local" else 1) for g in groups]


def plan_arena(groups: Sequence[GroupSpec], mode: str, slots: int, device: torch.device, across: Across = _ONE_NODE) -> ArenaPlan:
    """Regions of one rank's arena: ``shard.g``, ``grads.g``; in owner mode ``ring.j`` for the source with shard index j; across nodes
    ``land.s.g`` for group g of the shard in fan-out slot s, ``stage.n.g`` for the partial of the n-th other node, and ``announced``, the
    checksums of what is sent."""
    plan = ArenaPlan()
    for i, g in enumerate(groups):
        plan.add(f"shard.{i}", g.shard_nbytes)
    for i, nbytes in enumerate(_gradient_bytes(groups, mode)):
        plan.add(f"grads.{i}", nbytes)
    if mode == "owner":
        for j in range(max((g.shards for g in groups), default=1)):
            plan.add(f"ring.{j}", slots * piece_bytes(groups, device))
    for i, g in enumerate(groups):
        for s in range(across.landings):
            plan.add(f"land.{s}.{i}", with_checksum(g.shard_nbytes))
        for n in range(across.stagings):
            plan.add(f"stage.{n}.{i}", with_checksum(g.grad_nbytes))
    plan.add("announced", announced_nbytes(groups, across))
    return plan


def word_counts(groups: int, mode: str, ranks: int, shards: int, slots: int, across: Across = _ONE_NODE) -> dict[str, int]:
    """Control words of the protocols (:mod:`primus_odc.primitives.protocol`, :mod:`primus_odc.primitives.two_level`) that ranks of the
    same node store, and the payload words beside them."""
    words = {
        "published": 1,
        "done": 1,
        "begun": 1,
        "ready": groups,
        "narrow": groups,
        "normed": 1,
        "scalar": 2,
        "shard_sum": groups,
        "grad_sum": groups * shards,
    }
    if mode == "owner":
        words |= {"summed": groups, "head": ranks, "tail": ranks, "piece": shards * slots * PIECE_WORDS}
    if across.stagings:
        words |= {"partial": shards * groups, "partial_sum": groups}
    return words


def far_word_counts(groups: int, across: Across) -> dict[str, int]:
    """Words, and payload words, that ranks of other nodes store."""
    if not across.stagings:
        return {}
    nodes, landings = across.stagings + 1, across.landings
    words = {"landed": landings * groups, "arrived": nodes * groups, "node_done": nodes, "node_closed": nodes}
    return words | {"far_normed": landings, "far_scalar": 2 * landings}
