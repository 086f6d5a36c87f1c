"""The simulation of :mod:`tests.primitives.simulation` with nodes and a network between them.

What a rank sends lies in the network for any time. Only what goes to one destination under one word comes in order, as different words may
be sent from different streams. The network reads the source only when it delivers, in two halves, as it writes. Reading a word or data of
another node is a violation.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from primus_odc.primitives.effects import Do, Effect, Send, Wait
from primus_odc.primitives.nodes import Nodes
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.topology import Topology
from primus_odc.primitives.two_level import TwoLevelProtocol
from tests.primitives.scenario import Scenario, Violation
from tests.primitives.sim_plane import TORN, SimPlane, Token
from tests.primitives.simulation import Agent, Pending, World

SENT = ("landed", "arrived", "node_done", "node_closed", "far_normed")
"""Words that cross."""


@dataclass(frozen=True)
class NodeScenario(Scenario):
    """``members[node]`` are its ranks."""

    members: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.members, self.shards)


class NodeSimPlane(SimPlane):
    """Gradient buffers are rows ``(source, group, shard) -> (kind, epoch, tokens)``, kind being open, complete or partial."""

    w: NodeWorld

    def __init__(self, world: NodeWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.nodes = world.scenario.nodes
        self.node = self.nodes.node_of[rank]
        self.in_node: list[Token] = []

    def _near(self, rank: int, what: str) -> None:
        if self.nodes.node_of[rank] != self.node:
            raise Violation(f"rank {self.rank} reads {what} in another node")

    def _send(self, cells: dict[Any, Any], key: Any, source: Callable[[], Any], what: str, good: Callable[[Any], bool]) -> None:
        """The network delivers: the source must be what it was meant to be, in both halves."""
        before = source()
        cells[key] = TORN

        def finish() -> None:
            after = source()
            if before is TORN or before != after or not good(after):
                raise Violation(f"rank {self.rank}: the {what} changed before it had arrived: {before} then {after}")
            cells[key] = after

        self.finish = finish

    def land_shard(self, home: int, slot: int, group: int, epoch: int) -> None:
        source = lambda: self.w.shards.get((self.rank, group))  # noqa: E731
        self._send(self.w.landed, (home, slot, group), source, f"shard of group {group}", lambda found: found == epoch)

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        if self.nodes.node_of[owner] == self.node:
            super().read_shard(owner, group, epoch, into)
            return
        home, slot = self.nodes.landings(self.node)[owner]
        self._near(home, "a fan-out copy")

        def then(found: Any) -> None:
            if found != epoch:
                raise Violation(f"rank {self.rank}: the copy of group {group} of {owner} is of epoch {found}, not {epoch}")
            into(owner)

        self._read(self.w.landed, (home, slot, group), f"copy of group {group} of {owner}", then)

    def _write_rows(self, group: int, rows: list[Any]) -> None:
        keys = [(self.rank, group, shard) for shard in range(self.w.scenario.shards)]
        for key in keys:
            self.w.rows[key] = TORN

        def finish() -> None:
            self.w.rows.update(zip(keys, rows, strict=True))

        self.finish = finish

    def accumulate(self, group: int, contribution: list[Token]) -> None:
        rows = []
        for token in contribution:
            kind, _, tokens = ("open", 0, []) if self.fresh[group] else self.w.rows[(self.rank, group, token[4])]
            if kind != "open":
                raise Violation(f"rank {self.rank}: accumulates into a {kind} buffer of group {group}")
            rows.append(("open", 0, [*tokens, token]))
        self.fresh[group] = False
        self._write_rows(group, rows)

    def complete(self, group: int, epoch: int) -> None:
        self.fresh[group] = True
        self._write_rows(group, [("complete", epoch, self.w.rows[(self.rank, group, shard)][2]) for shard in range(self.w.scenario.shards)])

    def _row(self, source: int, group: int, shard: int, kind: str, epoch: int, then: Callable[[list[Token]], None]) -> None:
        self._near(source, "a gradient buffer")

        def check(found: Any) -> None:
            if found is None or found[:2] != (kind, epoch):
                raise Violation(f"rank {self.rank}: row {shard} of group {group} of {source} is not {kind} in epoch {epoch}: {found}")
            then(found[2])

        self._read(self.w.rows, (source, group, shard), f"row {shard} of group {group} of {source}", check)

    def add_in_node(self, source: int, shard: int, group: int, epoch: int) -> None:
        self._row(source, group, shard, "complete", epoch, self.in_node.extend)

    def complete_partial(self, shard: int, group: int, epoch: int) -> None:
        tokens, self.in_node = self.in_node, []
        self._write(self.w.rows, (self.rank, group, shard), ("partial", epoch, tokens))

    def send_partial(self, reducer: int, shard: int, group: int, epoch: int) -> None:
        source = lambda: self.w.rows[(self.rank, group, shard)]  # noqa: E731
        good = lambda found: found[:2] == ("partial", epoch)  # noqa: E731
        self._send(self.w.staging, (reducer, self.node, group), source, f"partial of group {group}", good)

    def pull(self, source: int, group: int, epoch: int) -> None:
        shard = self.shard_index
        add = lambda tokens: self.sums[group].extend(tokens)  # noqa: E731
        if self.nodes.node_of[source] == self.node:
            self._row(source, group, shard, "partial", epoch, add)
            return

        def then(found: Any) -> None:
            if found is None or found[:2] != ("partial", epoch):
                raise Violation(f"rank {self.rank}: the staging slot of {source} for group {group} is not of epoch {epoch}: {found}")
            add(found[2])

        here = self.nodes.reducer(self.node, shard)
        self._read(self.w.staging, (here, self.nodes.node_of[source], group), f"staging slot of {source}", then)

    def send_scalar(self, home: int, slot: int, parity: int) -> None:
        parity = self.w.parities(parity)
        source = lambda: self.w.scalars.get((self.rank, "scalar", parity))  # noqa: E731
        self._send(self.w.scalars, (home, "far_scalar", 2 * slot + parity), source, "number", lambda found: True)


@dataclass
class NodeWorld(World):
    """``protocol`` is a :class:`TwoLevelProtocol` or a broken variant of it."""

    scenario: NodeScenario
    protocol: type[Any] = TwoLevelProtocol
    plane: type[Any] = NodeSimPlane
    landed: dict[Any, Any] = field(default_factory=dict)
    rows: dict[Any, Any] = field(default_factory=dict)
    staging: dict[Any, Any] = field(default_factory=dict)

    def _make_protocol(self, rank: int, plane: SimPlane) -> RankProtocol:
        s = self.scenario
        groups, names = [f"g{g}" for g in range(s.groups)], [str(r) for r in range(s.world_size)]
        made: RankProtocol = self.protocol(
            Topology(rank, s.world_size, list(s.peers(rank)), s.owners(rank % s.shards), groups, names, s.nodes), plane
        )
        return made

    def runnable(self, agent: Agent) -> bool:
        if isinstance(agent.wait, Wait):
            self._near(agent.plane.rank, agent.wait.rank if agent.wait.home is None else agent.wait.home, agent.wait.word)
        return super().runnable(agent)

    def reader(self, rank: int) -> Callable[[int, str, int], int]:
        def read(home: int, word: str, index: int) -> int:
            self._near(rank, home, word)
            return self.read(home, word, index)

        return read

    def _near(self, rank: int, home: int, word: str) -> None:
        if self._apart(rank, home):
            raise Violation(f"rank {rank} reads word {word} in the memory of {home}, which is in another node")

    def _network(self, mains: list[Agent]) -> list[Agent]:
        lines = [(a, r, word) for a in mains for r in range(self.scenario.world_size) for word in SENT if self._apart(a.plane.rank, r)]
        return [Agent(f"{word} from {a.plane.rank} to {r}", self._deliver(r, a.sends[r, word]), a.plane) for a, r, word in lines]

    def _apart(self, rank: int, other: int) -> bool:
        nodes = self.scenario.nodes
        return nodes.node_of[rank] != nodes.node_of[other]

    def _deliver(self, rank: int, queue: deque[Send]) -> Iterator[Effect | Pending]:
        while True:
            yield lambda: list(range(len(queue)))
            if queue[0].put is not None:
                yield Do(queue[0].put)
            self._store(rank, queue.popleft())


def explore_nodes(scenario: NodeScenario, schedule_seed: int, **variants: Any) -> None:
    """Run one schedule of ``scenario``; raises :class:`Violation` if a rule is broken."""
    NodeWorld(scenario, random.Random(schedule_seed), **variants).run()
