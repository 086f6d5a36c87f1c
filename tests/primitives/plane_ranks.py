"""Ranks with the real data plane over real shared memory, as threads of one process, driven by the real driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.driver import ProgressThread, push, run
from primus_odc.primitives.node_plane import TwoLevelPlane
from primus_odc.primitives.nodes import Across, Nodes
from primus_odc.primitives.plane import ArenaPlane
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.spec import GroupSpec, far_word_counts, plan_arena, word_counts
from primus_odc.primitives.topology import Topology
from primus_odc.primitives.two_level import TwoLevelProtocol
from primus_odc.symmetric.arena import Region
from primus_odc.symmetric.heap import SymmetricHeap
from tests.primitives.groups import Shape, local_part, make_group
from tests.symmetric.harness import all_good, in_threads

Exchange = Callable[[Any], list[Any]]

CPU = torch.device("cpu")


def forbid_reading_other_nodes(heap: SymmetricHeap, near: Sequence[int]) -> None:
    """From here on only puts and signals reach the memory of ranks that are not ``near``; the heap's own words still do."""
    view, read, words = heap.view, heap.words.read, heap.words

    def near_view(rank: int, region: Region) -> torch.Tensor:
        assert rank in near, f"rank {heap.rank} maps memory of rank {rank}"
        return view(rank, region)

    def near_read(rank: int, name: str, index: int = 0) -> int:
        assert rank in near or name in ("heartbeat", "abort"), f"rank {heap.rank} reads {name} of rank {rank}"
        return read(rank, name, index)

    def put(rank: int, region: Region, data: torch.Tensor, offset: int = 0) -> None:
        source = data.reshape(-1).view(torch.uint8)
        view(rank, region)[offset : offset + source.numel()].copy_(source)

    heap.view, words.read, heap.put = near_view, near_read, put  # type: ignore[method-assign]


class PlaneRank:
    """One rank: ``parameters[group][param]`` are its local shards, ``grads[group]`` what the last settle delivered."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: Exchange,
        layout: Sequence[Sequence[Shape]],
        *,
        mode: str,
        replicas: int = 1,
        slots: int = 2,
        verify: bool = False,
        timeout_s: float = 10.0,
        gather_dtype: torch.dtype = torch.float32,
        members: tuple[tuple[int, ...], ...] = (),
        merge_bytes: int = 0,
    ) -> None:
        self.rank, self.mode, self.replicas, self.shards = rank, mode, replicas, world_size // replicas
        self.shard = rank % self.shards
        start = rank - self.shard
        self.peers = list(range(start, start + self.shards))
        self.groups = [make_group(f"g{i}", shapes, self.shards, self.shard, gather_dtype=gather_dtype) for i, shapes in enumerate(layout)]
        self.parameters: list[list[torch.Tensor]] = []
        self.grads: dict[int, torch.Tensor] = {}
        self.totals: dict[int, torch.Tensor] = {}  # of groups that are summed where they are delivered
        names = [f"rank {r}" for r in range(world_size)]
        owners = [self.shard + replica * self.shards for replica in range(replicas)]
        nodes = Nodes(members, self.shards) if members else None
        across = nodes.across if nodes else Across()
        plan = plan_arena(self.groups, mode, slots, CPU, across)
        words = word_counts(len(self.groups), mode, world_size, self.shards, slots, across)
        far_words = far_word_counts(len(self.groups), across)
        self.heap = SymmetricHeap(rank, names, plan, words, exchange, timeout_s, far_words=far_words)
        self.topology = Topology(rank, world_size, self.peers, owners, [g.name for g in self.groups], names, nodes)
        if nodes:
            forbid_reading_other_nodes(self.heap, self.topology.near)
        plane: dict[str, Any] = {
            "read_shard_of": lambda group, param: self.parameters[group][param],
            "reshard": lambda: None,
            "deliver": self._deliver,
            "verify": verify,
        }
        self.plane: ArenaPlane
        self.protocol: RankProtocol
        if nodes:
            far = TwoLevelPlane(self.heap, self.topology, self.groups, **plane)
            self.plane, self.protocol = far, TwoLevelProtocol(self.topology, far)
        else:
            merging: dict[str, Any] = {"direct": lambda group: self.totals.get(group), "merge_bytes": merge_bytes}
            self.totals = {g: torch.empty(s.grad_numel, dtype=s.sum_dtype) for g, s in enumerate(self.groups) if g % 4 != 2 and merge_bytes}
            self.plane = ArenaPlane(self.heap, self.topology, self.groups, mode=mode, slots=slots, **plane, **merging)
            self.protocol = RankProtocol(self.topology, self.plane, mode, slots)
        self.progress: ProgressThread | None = None

    def set_parameters(self, full: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take this rank's shards of whole parameters ``full[group][param]``."""
        self.parameters = [[local_part(p, self.shards, self.shard) for p in group] for group in full]

    def _deliver(self, group: int, fill: Callable[[torch.Tensor], None]) -> None:
        total = self.totals.get(group)
        if total is None:
            total = torch.full((self.groups[group].grad_numel,), float("nan"), dtype=self.groups[group].sum_dtype)
        fill(total)
        self.grads[group] = total.clone()

    def publish(self) -> None:
        run(self.heap, self.protocol.publish())
        run(self.heap, self.protocol.land())

    def gather(self, group: int) -> torch.Tensor:
        """All shards of a group: bytes, ``[shards, shard_nbytes]``."""
        rows = torch.zeros(self.shards, self.groups[group].shard_nbytes, dtype=torch.uint8)
        row = dict(zip(self.peers, rows, strict=True))
        nbytes = self.groups[group].shard_nbytes
        run(self.heap, self.protocol.gather(group, lambda owner: [(0, nbytes, row[owner])], own=True))
        return rows

    def reduce(self, group: int, contribution: Contribution, in_place: Literal["only", "first"] | None = None) -> None:
        """``in_place``: (local mode) written where the plane says first, if it says so, as FSDP2 does it."""
        if self.mode == "local":
            if in_place is not None and contribution.rows.shape[1] == self.groups[group].grad_numel:
                place = self.plane.place(group, contribution.rows.dtype, only=in_place == "only")
                if place is not None:
                    place.copy_(contribution.rows.view(-1))
                    contribution = Contribution(place.view(self.shards, -1), contribution.params)
            run(self.heap, self.protocol.reduce_local(group, contribution))
            return
        push(self.heap, self.protocol, self.plane, group, contribution)

    def settle(self) -> None:
        run(self.heap, self.protocol.settle(self.heap.words.read))

    def start_progress(self) -> None:
        if self.mode == "owner":
            self.progress = ProgressThread(self.heap, self.protocol, self.plane.lanes)

    def close(self) -> None:
        run(self.heap, self.protocol.close())
        self.leave()

    def leave(self) -> None:
        """End threads and sockets without waiting for anybody."""
        if self.progress is not None:
            self.progress.stop()
        self.heap.close()


def make_ranks(world_size: int, layout: Sequence[Sequence[Shape]], **options: Any) -> list[PlaneRank]:
    return all_good(in_threads(world_size, lambda rank, exchange: PlaneRank(rank, world_size, exchange, layout, **options)))


@contextmanager
def open_ranks(world_size: int, layout: Sequence[Sequence[Shape]], **options: Any) -> Iterator[list[PlaneRank]]:
    ranks = make_ranks(world_size, layout, **options)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.leave()


def together(ranks: Sequence[PlaneRank], call: Callable[[PlaneRank], Any]) -> list[Any]:
    """``call(rank)`` in one thread per rank; results, exceptions as values."""
    return in_threads(len(ranks), lambda rank, _: call(ranks[rank]))


def settle_and_publish(rank: PlaneRank) -> None:
    """A rank that needs nothing from the one that fails may still get through its settle, never through the next publish."""
    rank.settle()
    rank.publish()


def random_parameters(layout: Sequence[Sequence[Shape]], generator: torch.Generator) -> list[list[torch.Tensor]]:
    return [[torch.randn(rows, columns, generator=generator) for rows, columns, _ in shapes] for shapes in layout]


def padded_rows(full: Sequence[torch.Tensor], group: GroupSpec, before: torch.Tensor) -> torch.Tensor:
    """The published bytes of every shard, ``[shards, shard_nbytes]``; padding as it is in ``before`` (nobody writes it)."""
    rows = before.clone()
    for shard in range(group.shards):
        for p, whole in zip(group.params, full, strict=True):
            part = local_part(whole, group.shards, shard).to(p.gather_dtype).reshape(-1).view(torch.uint8)
            rows[shard, p.shard_offset : p.shard_offset + part.numel()] = part
    return rows
