"""The protocol across nodes under random schedules, and proof that the simulation notices when one of its rules is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primus_odc.primitives.effects import Do, Effect, Send, Steps, Store, Wait
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.two_level import TwoLevelProtocol
from tests.primitives.node_simulation import NodeScenario, NodeSimPlane, explore_nodes
from tests.primitives.scenario import Violation

PAIRS, STRIDED = ((0, 1), (2, 3)), ((0, 2), (1, 3))
SCENARIOS = {
    "2x2": NodeScenario(4, "local", members=PAIRS),
    "2+1": NodeScenario(3, "local", groups=3, members=((0, 1), (2,))),
    "1+1": NodeScenario(2, "local", members=((0,), (1,))),
    "2x2-strided": NodeScenario(4, "local", members=STRIDED),
    "hsdp-group-in-node": NodeScenario(4, "local", replicas=2, members=PAIRS),
    "hsdp-group-across": NodeScenario(4, "local", replicas=2, members=STRIDED),
    "hsdp-1+2+1": NodeScenario(4, "local", replicas=2, members=((0,), (1, 2), (3,))),
    "replicas-only": NodeScenario(4, "local", replicas=4, members=PAIRS),
    "2+2+1": NodeScenario(5, "local", max_count=2, members=((0, 1), (2, 3), (4,))),
}
SCHEDULES = 60
MUTANT_SCHEDULES = 3000


@pytest.mark.parametrize("name", SCENARIOS)
def test_seeded_schedules(name: str) -> None:
    for seed in range(SCHEDULES):
        explore_nodes(dataclasses.replace(SCENARIOS[name], seed=seed), seed)


@st.composite
def scenarios(draw: st.DrawFn) -> NodeScenario:
    """Any ranks in two or more nodes of any sizes."""
    world_size = draw(st.integers(2, 5))
    cuts = draw(st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size).filter(lambda nodes: len(set(nodes)) > 1))
    return NodeScenario(
        world_size=world_size,
        mode="local",
        replicas=draw(st.sampled_from([r for r in (1, 2, 4) if world_size % r == 0])),
        groups=draw(st.integers(1, 3)),
        epochs=draw(st.integers(1, 4)),
        max_count=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1 << 32)),
        members=tuple(tuple(r for r in range(world_size) if cuts[r] == node) for node in sorted(set(cuts))),
    )


@given(scenarios(), st.integers(0, 1 << 32))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_scenario(scenario: NodeScenario, schedule_seed: int) -> None:
    explore_nodes(scenario, schedule_seed)


# Broken variants ----------------------------------------------------------------------------------------------------------------------


def less(steps: Iterator[Effect], unwanted: Callable[[Effect], bool]) -> Steps:
    """``steps`` without the effects that are ``unwanted``."""
    return (effect for effect in steps if not unwanted(effect))


def waits(*words: str) -> Callable[[Effect], bool]:
    return lambda effect: isinstance(effect, Wait) and effect.word in words


class OneLevel(RankProtocol):
    """The protocol of one node: reads words and shards of other nodes."""

    def __init__(self, topology: Any, plane: Any) -> None:
        super().__init__(topology, plane, "local")


class PublishesBeforeItsNode(TwoLevelProtocol):
    def publish(self) -> Steps:
        return less(super().publish(), waits("done"))


class PublishesBeforeOtherNodes(TwoLevelProtocol):
    """Overwrites fan-out copies that another node still reads, or staging slots it has not added."""

    def publish(self) -> Steps:
        return less(super().publish(), waits("node_done"))


class TellsForItself(TwoLevelProtocol):
    """Says that its node is done when it is done itself."""

    def _until_all(self, word: str, at_least: int, operation: str, in_vain: Any = None) -> Steps:
        effects = list(super()._until_all(word, at_least, operation, in_vain))
        yield from (e for e in effects if isinstance(e, Send))
        yield from (e for e in effects if not isinstance(e, Send))


class GathersBeforeLanding(TwoLevelProtocol):
    def gather(self, group: int, into: Any, *, own: bool = False) -> Steps:
        return less(super().gather(group, into, own=own), waits("landed"))


class WordBeforeData(TwoLevelProtocol):
    """Sends a word and then the data it covers."""

    word = ""

    def _parted(self, steps: Iterator[Effect]) -> Steps:
        for effect in steps:
            if isinstance(effect, Send) and effect.word == self.word:
                yield dataclasses.replace(effect, put=None)
            yield effect

    def land(self) -> Steps:
        return self._parted(super().land())

    def settle(self, read_word: Any) -> Steps:
        return self._parted(super().settle(read_word))

    def exchange(self, put: Any, operation: str) -> Iterator[Effect]:
        return self._parted(super().exchange(put, operation))


class LandsBeforeData(WordBeforeData):
    word = "landed"


class ArrivesBeforeData(WordBeforeData):
    word = "arrived"


class CountsBeforeNumber(WordBeforeData):
    word = "far_normed"


class DoneBeforeLanding(TwoLevelProtocol):
    """A rank without a microbatch never gathers, and says done while copies are still coming in."""

    def _finish(self) -> Steps:
        return less(super()._finish(), waits("landed"))


class ReducesAtOnce(TwoLevelProtocol):
    def settle(self, read_word: Any) -> Steps:
        return less(super().settle(read_word), waits("ready"))


class SumsBeforeArrival(TwoLevelProtocol):
    def settle(self, read_word: Any) -> Steps:
        return less(super().settle(read_word), waits("arrived"))


class SumsBeforePartial(TwoLevelProtocol):
    def settle(self, read_word: Any) -> Steps:
        return less(super().settle(read_word), waits("partial"))


class PartialBeforeComplete(TwoLevelProtocol):
    def _reduce(self, group: int, read_word: Any) -> Steps:
        effects = list(super()._reduce(group, read_word))
        yield from (e for e in effects if isinstance(e, Wait))
        yield from (e for e in effects if isinstance(e, Store))
        yield from (e for e in effects if not isinstance(e, Wait | Store))


class ArrivesWithData(TwoLevelProtocol):
    """Says that its node has a partial where no rank of it has data."""

    def settle(self, read_word: Any) -> Steps:
        for effect in super().settle(read_word):
            yield dataclasses.replace(effect, value=effect.value | 1) if isinstance(effect, Send) else effect


class SendsWhatItHas(TwoLevelProtocol):
    """Sends its own row before what its mates have was added."""

    def _reduce(self, group: int, read_word: Any) -> Steps:
        effects = list(super()._reduce(group, read_word))
        yield from (e for e in effects if not isinstance(e, Do))
        yield from (e for e in effects if isinstance(e, Do))


class ReducesEverything(TwoLevelProtocol):
    """Every rank makes every partial in its own buffer, whose rows its mates read too."""

    def __init__(self, topology: Any, plane: Any) -> None:
        super().__init__(topology, plane)
        self._duties = [(shard, self._destinations(shard) if (shard, d) in self._duties else []) for shard, d in self._all()]

    def _all(self) -> list[tuple[int, list[int]]]:
        return [(shard, self._destinations(shard)) for shard in range(self.n.shards)]


class DoneBeforeTheSum(TwoLevelProtocol):
    def settle(self, read_word: Any) -> Steps:
        yield Store("done", 0, self.epoch)
        yield from super().settle(read_word)


class ExtraPublishForgetsDone(TwoLevelProtocol):
    def publish(self) -> Steps:
        return less(super().publish(), lambda e: isinstance(e, Store) and e.word == "done")


class ExchangesAtOnce(TwoLevelProtocol):
    def exchange(self, put: Any, operation: str) -> Iterator[Effect]:
        return less(super().exchange(put, operation), waits("far_normed"))


class OneCopyForAll(NodeSimPlane):
    """Two owners whose copies one rank keeps share a slot."""

    def land_shard(self, home: int, slot: int, group: int, epoch: int) -> None:
        source = lambda: (self.rank, self.w.shards.get((self.rank, group)))  # noqa: E731
        self._send(self.w.landed, (home, 0, group), source, "shard", lambda found: True)

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        if self.nodes.node_of[owner] == self.node:
            super().read_shard(owner, group, epoch, into)
            return
        home, _ = self.nodes.landings(self.node)[owner]

        def then(found: Any) -> None:
            if found != (owner, epoch):
                raise Violation(f"rank {self.rank}: the copy is {found}, not group {group} of {owner} in epoch {epoch}")
            into(owner)

        self._read(self.w.landed, (home, 0, group), "copy", then)


class KeepsUnsharded(NodeSimPlane):
    def reshard(self) -> None:
        self.finish = None


SQUARE, UNEVEN, MIXED = SCENARIOS["2x2"], SCENARIOS["2+1"], SCENARIOS["hsdp-group-across"]
MUTANTS: dict[str, tuple[NodeScenario, dict[str, Any]]] = {
    "the protocol of one node": (SQUARE, {"protocol": OneLevel}),
    "publish without waiting for the own node": (SQUARE, {"protocol": PublishesBeforeItsNode}),
    "publish without waiting for other nodes": (SQUARE, {"protocol": PublishesBeforeOtherNodes}),
    "publish without waiting for other nodes, hsdp": (SCENARIOS["hsdp-group-in-node"], {"protocol": PublishesBeforeOtherNodes}),
    "a contact speaks for itself only": (SQUARE, {"protocol": TellsForItself}),
    "gather without waiting for the landing": (SQUARE, {"protocol": GathersBeforeLanding}),
    "landed before the data": (SQUARE, {"protocol": LandsBeforeData}),
    "arrived before the data": (SQUARE, {"protocol": ArrivesBeforeData}),
    "a number after its count": (dataclasses.replace(SQUARE, epochs=4), {"protocol": CountsBeforeNumber}),
    "done while copies come in": (UNEVEN, {"protocol": DoneBeforeLanding}),
    "reduction in the node without waiting": (SQUARE, {"protocol": ReducesAtOnce}),
    "sum without waiting for other nodes": (SQUARE, {"protocol": SumsBeforeArrival}),
    "sum without waiting for the own node": (MIXED, {"protocol": SumsBeforePartial}),
    "partial before it is complete": (MIXED, {"protocol": PartialBeforeComplete}),
    "arrived with data where there is none": (SQUARE, {"protocol": ArrivesWithData}),
    "own row sent for the partial": (SQUARE, {"protocol": SendsWhatItHas}),
    "two reducers of one shard": (SQUARE, {"protocol": ReducesEverything}),
    "done before the sum": (MIXED, {"protocol": DoneBeforeTheSum}),
    "extra publish forgets done": (SQUARE, {"protocol": ExtraPublishForgetsDone}),
    "exchange without waiting": (dataclasses.replace(SQUARE, epochs=4), {"protocol": ExchangesAtOnce}),
    "exchange with one place": (dataclasses.replace(SQUARE, epochs=4), {"parities": lambda parity: 0}),
    "two copies in one slot": (UNEVEN, {"plane": OneCopyForAll}),
    "publish keeps unsharded parameters": (SQUARE, {"plane": KeepsUnsharded}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str) -> None:
    scenario, variants = MUTANTS[name]
    with pytest.raises(Violation):
        for seed in range(MUTANT_SCHEDULES):
            explore_nodes(dataclasses.replace(scenario, seed=seed), seed, **variants)
