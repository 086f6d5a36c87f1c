"""Parameter groups for tests, laid out independently of the engine: uneven shards, frozen parameters, several dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.spec import GroupSpec, ParamSpec

Shape = tuple[int, int, bool]
"""``(rows, columns, trainable)`` of a parameter; rows are sharded."""

SHAPES: tuple[Shape, ...] = ((7, 3, True), (1, 5, True), (4, 2, False), (8, 4, True), (3, 1, True))


def make_group(
    name: str,
    shapes: Sequence[Shape],
    shards: int,
    shard: int,
    *,
    gather_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
    sum_dtype: torch.dtype = torch.float32,
) -> GroupSpec:
    """The group as rank ``shard`` describes it: dimension 0 in equal blocks, the last ones short or empty."""
    params: list[ParamSpec] = []
    shard_nbytes = grad_numel = 0
    for i, (rows, columns, trainable) in enumerate(shapes):
        block = -(-rows // shards)
        local = max(0, min(block, rows - shard * block))
        params.append(ParamSpec(f"{name}.{i}", trainable, gather_dtype, block * columns, (local, columns), shard_nbytes, grad_numel))
        shard_nbytes += block * columns * gather_dtype.itemsize
        grad_numel += block * columns if trainable else 0
    return GroupSpec(name, tuple(params), shards, shard_nbytes, grad_numel, grad_dtype, sum_dtype)


def local_part(full: torch.Tensor, shards: int, shard: int) -> torch.Tensor:
    """The rows of a whole parameter (``[rows, columns]``) that rank ``shard`` owns."""
    block = -(-full.shape[0] // shards)
    return full[min(shard * block, full.shape[0]) : min((shard + 1) * block, full.shape[0])]


def make_contribution(
    group: GroupSpec, params: Sequence[int], generator: torch.Generator, dtype: torch.dtype, *, whole: bool
) -> Contribution:
    """Random gradients of ``params``; ``whole``: small whole numbers, whose sums are exact in any order."""
    numel = sum(group.params[i].padded_numel for i in params)
    if whole:
        rows = torch.randint(-8, 9, (group.shards, numel), generator=generator).to(dtype)
    else:
        rows = torch.randn(group.shards, numel, generator=generator).to(dtype)
    return Contribution(rows, tuple(params))


@st.composite
def groups(draw: st.DrawFn, shards: int | None = None) -> GroupSpec:
    """A random group as seen from a random rank."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
    number = shards or draw(st.integers(1, 4))
    return make_group("group", shapes, number, draw(st.integers(0, number - 1)))


@st.composite
def subsets(draw: st.DrawFn, group: GroupSpec) -> list[int]:
    """Trainable parameters of a group, any of them, in flat order."""
    return [i for i, _ in group.trainable() if draw(st.booleans())]
