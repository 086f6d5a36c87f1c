"""Which ranks share a node, and who deals with whom across nodes: pure arithmetic, the same on every rank.

Ranks are heap ranks: replica x shards + shard index. Nodes may have any sizes and hold any ranks. Work is dealt out in the order of the
ranks' places in their nodes, so that in nodes of equal size a rank talks to those of its own place elsewhere (its rail).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from primus_odc.errors import ConfigError


@dataclass(frozen=True)
class Across:
    """What a rank's arena holds for other nodes: ``landings`` fan-out copies of whole foreign shards (as many as the busiest rank of the
    job keeps), ``stagings`` slots for other nodes' partial sums of its own shard (nodes - 1)."""

    landings: int = 0
    stagings: int = 0


@dataclass(frozen=True)
class Nodes:
    """``members[node]`` are its ranks, ascending; ``shards`` the length of a shard group."""

    members: tuple[tuple[int, ...], ...]
    shards: int

    @cached_property
    def node_of(self) -> dict[int, int]:
        """rank -> node"""
        return {rank: node for node, ranks in enumerate(self.members) for rank in ranks}

    @cached_property
    def _landings(self) -> list[dict[int, tuple[int, int]]]:
        found = []
        for node, ranks in enumerate(self.members):
            groups = {rank // self.shards for rank in ranks}
            owners = [r for r in self._elsewhere(node) if r // self.shards in groups]
            found.append({owner: (ranks[i % len(ranks)], i // len(ranks)) for i, owner in enumerate(owners)})
        return found

    @cached_property
    def _contacts(self) -> list[dict[int, int]]:
        return [{rank: ranks[i % len(ranks)] for i, rank in enumerate(self._elsewhere(node))} for node, ranks in enumerate(self.members)]

    @cached_property
    def _reducers(self) -> list[list[int]]:
        found = []
        for node, ranks in enumerate(self.members):
            here = {rank % self.shards: rank for rank in reversed(ranks)}  # of several owners of a shard, the first
            others = [rank for rank in self._elsewhere(node) if rank < self.shards and rank not in here]
            here |= {shard: ranks[i % len(ranks)] for i, shard in enumerate(others)}
            found.append([here[shard] for shard in range(self.shards)])
        return found

    def _elsewhere(self, node: int) -> list[int]:
        """The ranks of the other nodes: node by node, each in ascending order."""
        return [rank for n, ranks in enumerate(self.members) if n != node for rank in ranks]

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def across(self) -> Across:
        """What every rank's arena holds for other nodes."""
        return Across(self.landing_slots, self.count - 1)

    @cached_property
    def landing_slots(self) -> int:
        """Foreign shards that the busiest rank of the job keeps a fan-out copy of."""
        return max((slot + 1 for homes in self._landings for _, slot in homes.values()), default=0)

    def landing(self, owner: int, node: int) -> tuple[int, int] | None:
        """``(rank, slot)`` that keeps the copy of ``owner``'s shards for ``node``; None where nobody there needs it."""
        return self._landings[node].get(owner)

    def landings(self, node: int) -> dict[int, tuple[int, int]]:
        """Owner of another node -> ``(rank, slot)`` that keeps its copy in ``node``."""
        return self._landings[node]

    def contact(self, node: int, rank: int) -> int:
        """Who tells ``rank``, which is elsewhere, that all ranks of ``node`` have got somewhere."""
        return self._contacts[node][rank]

    def told_by(self, rank: int) -> list[int]:
        """The ranks of other nodes whose contact ``rank`` is, those of the next node first."""
        node = self.node_of[rank]
        return self.from_next_node(node, [other for other, contact in self._contacts[node].items() if contact == rank])

    def reducer(self, node: int, shard: int) -> int:
        """Who adds up what the ranks of ``node`` have for ``shard``: an owner of it, if the node has one."""
        return self._reducers[node][shard]

    def reduced_by(self, rank: int) -> list[int]:
        """The shards whose reducer ``rank`` is, those owned in the next node first."""
        node = self.node_of[rank]
        mine = [shard for shard, reducer in enumerate(self._reducers[node]) if reducer == rank]
        return sorted(mine, key=lambda shard: (min((n - node - 1) % self.count for n in self.owning_nodes(shard)), shard))

    def owners_in(self, node: int, shard: int) -> list[int]:
        """The ranks of ``node`` that own ``shard``, the reducer first."""
        return [rank for rank in self.members[node] if rank % self.shards == shard]

    def owning_nodes(self, shard: int) -> list[int]:
        """The nodes with an owner of ``shard``."""
        return [node for node in range(self.count) if self.owners_in(node, shard)]

    def from_next_node(self, node: int, ranks: Sequence[int]) -> list[int]:
        """``ranks`` in the order of their nodes, the one after ``node`` first: not everybody talks to the same node at once."""
        return sorted(ranks, key=lambda rank: ((self.node_of[rank] - node - 1) % self.count, rank))


def group_into_nodes(
    global_ranks: Sequence[int], ranks_per_node: int | None, shards: int, machines: Sequence[str] | None = None
) -> Nodes | None:
    """Nodes of ``ranks_per_node`` consecutive global ranks (the last one may be short); None where all ranks share one.

    Args:
        global_ranks: of every heap rank.
        ranks_per_node: None: a node is a machine.
        shards: length of a shard group.
        machines: of every heap rank, by any name; None: all share one.

    Raises:
        ConfigError: ranks of several machines would share a node.
    """
    by_node: dict[int | str, list[int]] = {}
    first: dict[int | str, int] = {}
    for rank, global_rank in enumerate(global_ranks):
        machine = machines[rank] if machines is not None else ""
        node = machine if ranks_per_node is None else global_rank // ranks_per_node
        by_node.setdefault(node, []).append(rank)
        first[node] = min(first.get(node, global_rank), global_rank)
        if machines is not None and machine != machines[by_node[node][0]]:
            others = global_ranks[by_node[node][0]]
            raise ConfigError(
                [
                    f"odc.ranks_per_node: {ranks_per_node} puts global ranks {others} and {global_rank}, which run on different machines, "
                    "into one node, and ranks of a node share memory: leave it unset, or set it to a divisor of the ranks of a machine"
                ]
            )
    nodes = sorted(by_node, key=lambda node: first[node])
    return Nodes(tuple(tuple(by_node[node]) for node in nodes), shards) if len(nodes) > 1 else None
