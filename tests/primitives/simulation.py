"""Many ranks' protocol generators in one process, interleaved by a random schedule over a memory that notices every torn or stale access.

A ``Do`` is executed in two halves, between which any other agent may run: a write leaves ``TORN`` in the cell until its second half, a
read looks twice and must see the same complete value both times. Reading a control word is a preemption point as well. In half of the
schedules words are stored late, as device streams do it: in order, but any time after the effect, even for the rank itself. What the ranks
move is not numbers but tokens ``(source, epoch, group, microbatch, shard)``, so a contribution that is lost, doubled or counted in the
wrong epoch is seen as such.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from primus_odc.primitives.effects import Do, Effect, Send, Store, Wait
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.topology import Topology
from tests.primitives.rank_main import rank_main
from tests.primitives.scenario import Scenario, Step, Violation, make_steps
from tests.primitives.sim_plane import Finish, SimPlane, Token

MAX_DEPTH = 3
"""Nested preemptions at reads of words."""

IDLE_ROUNDS = 20
"""How often in a schedule a progress thread looks at a source without need; bounded, so that a deadlock is seen."""

Pending = Callable[[], list[int]]
"""What an idle progress thread waits for: sources with pieces to add."""


@dataclass
class Agent:
    """A generator of effects and the second half of the effect it is in the middle of."""

    name: str
    steps: Iterator[Effect | Pending]
    plane: SimPlane
    finish: Finish | None = None
    wait: Wait | Pending | None = None
    running: bool = False
    ended: bool = False
    stores: deque[Store] = field(default_factory=deque)
    """Given to this agent's stream and not visible yet."""
    sends: defaultdict[tuple[int, str], deque[Send]] = field(default_factory=lambda: defaultdict(deque))
    """By destination and word: given to the network and not arrived yet."""


@dataclass
class World:
    """Memory, words and agents of all ranks. ``protocol`` and ``plane`` may be variants with a broken rule."""

    scenario: Scenario
    schedule: random.Random
    protocol: type[RankProtocol] = RankProtocol
    plane: type[SimPlane] = SimPlane
    parities: Callable[[int], int] = lambda parity: parity
    shards: dict[Any, Any] = field(default_factory=dict)
    buffers: dict[Any, Any] = field(default_factory=dict)
    rings: dict[Any, Any] = field(default_factory=dict)
    accumulators: dict[Any, Any] = field(default_factory=dict)
    scalars: dict[Any, Any] = field(default_factory=dict)
    words: defaultdict[tuple[int, str, int], int] = field(default_factory=lambda: defaultdict(int))
    delivered: list[tuple[int, int, Counter[Token]]] = field(default_factory=list)
    depth: int = 0

    def run(self) -> None:
        """One schedule from start to end; raises :class:`Violation`."""
        scenario = self.scenario
        steps = make_steps(scenario)
        self.agents: list[Agent] = []
        mains: list[Agent] = []
        for rank in range(scenario.world_size):
            plane = self.plane(self, rank)
            protocol = self._make_protocol(rank, plane)
            mains.append(Agent(f"rank {rank}", rank_main(self, protocol, plane, steps), plane))
            if scenario.mode == "owner":
                self.agents.append(Agent(f"progress of {rank}", self._progress(protocol), plane))
        self.agents += mains
        self.late = self.schedule.random() < 0.5
        self.agents += [Agent(f"stream of {a.name}", self._stream(a), a.plane) for a in list(self.agents)]
        self.agents += self._network(mains)
        stickiness, chance = self.schedule.choice((0.3, 0.8, 0.97)), self.schedule.random
        self.unfinished = len(mains)
        while self.unfinished:
            start = int(chance() * len(self.agents))
            agent = next((a for a in self.agents[start:] + self.agents[:start] if self.runnable(a)), None)
            if agent is None:
                waits = "; ".join(f"{a.name} for {a.wait}" for a in self.agents if isinstance(a.wait, Wait))
                raise Violation(f"deadlock: {waits}")
            self.advance(agent)
            while chance() < stickiness and self.runnable(agent):
                self.advance(agent)
        check_delivered(self, steps)

    def _make_protocol(self, rank: int, plane: SimPlane) -> RankProtocol:
        scenario = self.scenario
        topology = Topology(
            rank,
            scenario.world_size,
            list(scenario.peers(rank)),
            scenario.owners(rank % scenario.shards),
            [f"g{g}" for g in range(scenario.groups)],
            [str(r) for r in range(scenario.world_size)],
        )
        return self.protocol(topology, plane, scenario.mode, scenario.slots)

    def _network(self, mains: list[Agent]) -> list[Agent]:
        """What carries ``Send`` effects: nothing does inside a node."""
        return []

    def reader(self, rank: int) -> Callable[[int, str, int], int]:
        """Loads words for ``rank``."""
        return self.read

    def read(self, rank: int, word: str, index: int) -> int:
        """Load a word; others may run before the load."""
        if self.depth < MAX_DEPTH and self.schedule.random() < 0.5:
            self.depth += 1
            for agent in self.schedule.sample(self.agents, len(self.agents)):
                for _ in range(self.schedule.choice((0, 1, 8, 40))):
                    if self.runnable(agent):
                        self.advance(agent)
            self.depth -= 1
        return self.words[(rank, word, index)]

    def runnable(self, agent: Agent) -> bool:
        if agent.running or agent.ended:
            return False
        wait = agent.wait
        if not isinstance(wait, Wait):
            return wait is None or bool(wait())
        return self.words[(wait.rank if wait.home is None else wait.home, wait.word, wait.index)] >= wait.at_least

    def advance(self, agent: Agent) -> None:
        """Let ``agent`` do one thing: the rest of an effect, or the next effect up to its preemption point."""
        agent.running, agent.wait = True, None
        if agent.finish is not None:
            finish, agent.finish = agent.finish, None
            finish()
        else:
            effect = next(agent.steps, None)
            if effect is None:
                agent.ended = True
                self.unfinished -= 1
            elif isinstance(effect, Do):
                effect.action()
                agent.finish, agent.plane.finish = agent.plane.finish, None
            elif isinstance(effect, Store):
                if self.late:
                    agent.stores.append(effect)
                else:
                    self._store(agent.plane.rank, effect)
            elif isinstance(effect, Send):
                agent.sends[effect.rank, effect.word].append(effect)
            else:
                agent.wait = effect
        agent.running = False
        self._check_not_in_vain(agent)

    def _store(self, rank: int, store: Store | Send) -> None:
        key = (rank, store.word, store.index)
        if store.value < self.words[key]:
            raise Violation(f"word {key} falls from {self.words[key]} to {store.value}")
        self.words[key] = store.value
        if store.word == "begun":
            for agent in self.agents:
                self._check_not_in_vain(agent)

    def _check_not_in_vain(self, agent: Agent) -> None:
        """Ranks that make the same calls in the same order are never told that they do not."""
        wait = agent.wait
        if not isinstance(wait, Wait) or wait.in_vain is None or agent.running or self.runnable(agent):
            return
        if reason := wait.in_vain(lambda *word: self.words[word]):
            raise Violation(f"{agent.name} waits for {wait}: {reason}")

    def _stream(self, agent: Agent) -> Iterator[Effect | Pending]:
        """Makes what ``agent`` stored visible, some time."""
        while True:
            yield lambda: list(range(len(agent.stores)))
            self._store(agent.plane.rank, agent.stores.popleft())

    def _progress(self, protocol: RankProtocol) -> Iterator[Effect | Pending]:
        """The owner's progress thread: serves a source that has pushed, any of them, and now and then one that has not."""
        me = protocol.t.rank
        sources = [r for r in self.scenario.peers(me) if r != me]
        idle = IDLE_ROUNDS

        def pending() -> list[int]:
            found = [s for s in sources if self.words[(s, "head", me)] > self.words[(me, "tail", s)]]
            return found or sources[: idle > 0]

        while True:
            yield pending
            found = pending()
            idle -= self.words[(found[0], "head", me)] == self.words[(me, "tail", found[0])]
            yield from protocol.serve(self.read, self.schedule.choice(found))


def check_delivered(world: World, steps: list[Step]) -> None:
    """Every rank got, for every group and epoch, each contribution to its shard exactly once."""
    scenario = world.scenario
    trained = [(k, step.used) for k, step in enumerate(steps, 1) if step.used is not None]
    for rank in range(scenario.world_size):
        shard = rank - scenario.peers(rank).start
        for group in range(scenario.groups):
            sums = [tokens for r, g, tokens in world.delivered if (r, g) == (rank, group)]
            expected = [
                Counter((s, k, group, m, shard) for s in range(scenario.world_size) for m, groups in enumerate(used[s]) if group in groups)
                for k, used in trained
            ]
            if sums != expected:
                raise Violation(f"rank {rank}: group {group} received {sums}, expected {expected}")


def explore(scenario: Scenario, schedule_seed: int, **variants: Any) -> None:
    """Run one schedule of ``scenario``; raises :class:`Violation` if a rule is broken."""
    World(scenario, random.Random(schedule_seed), **variants).run()
