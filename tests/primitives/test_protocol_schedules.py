"""The protocol under random schedules, and proof that the simulation notices when one of its rules is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primus_odc.primitives.effects import Effect, ReadWord, Steps, Store, Wait
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.pushes import Pushes
from primus_odc.primitives.topology import DataPlane, Topology
from tests.primitives.scenario import Scenario, Violation
from tests.primitives.sim_plane import SimPlane, Token
from tests.primitives.simulation import explore

SCENARIOS = {
    "local-1": Scenario(1, "local"),
    "local-2": Scenario(2, "local"),
    "local-3": Scenario(3, "local", groups=3),
    "local-4": Scenario(4, "local"),
    "local-hsdp": Scenario(4, "local", replicas=2),
    "local-replicas-only": Scenario(2, "local", replicas=2),
    "owner-1": Scenario(1, "owner", slots=1),
    "owner-2-slot-1": Scenario(2, "owner", slots=1),
    "owner-2-slots-3": Scenario(2, "owner", slots=3),
    "owner-3-slots-2": Scenario(3, "owner", slots=2),
    "owner-4-slot-1": Scenario(4, "owner", slots=1, max_count=2),
    "owner-hsdp": Scenario(4, "owner", replicas=2, slots=2, max_count=2),
}
SCHEDULES = 170
"""Seeded schedules of each scenario."""
MUTANT_SCHEDULES = 3000
"""A broken rule must be found within so many."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_seeded_schedules(name: str) -> None:
    for seed in range(SCHEDULES):
        explore(dataclasses.replace(SCENARIOS[name], seed=seed), seed)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    world_size = draw(st.integers(1, 4))
    return Scenario(
        world_size=world_size,
        mode=draw(st.sampled_from(["local", "owner"])),
        replicas=draw(st.sampled_from([r for r in (1, 2) if world_size % r == 0])),
        groups=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 3)),
        epochs=draw(st.integers(1, 4)),
        max_count=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1 << 32)),
    )


@given(scenarios(), st.integers(0, 1 << 32))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_scenario(scenario: Scenario, schedule_seed: int) -> None:
    explore(scenario, schedule_seed)


# Broken variants ----------------------------------------------------------------------------------------------------------------------


def without_waits(steps: Iterator[Effect], unwanted: Callable[[Wait], bool]) -> Steps:
    """``steps`` less the waits that are ``unwanted``."""
    for effect in steps:
        if not (isinstance(effect, Wait) and unwanted(effect)):
            yield effect


class PublishesAtOnce(RankProtocol):
    def publish(self) -> Steps:
        return without_waits(super().publish(), lambda wait: wait.word == "done")


class WaitsInOwnReplicaOnly(RankProtocol):
    def publish(self) -> Steps:
        return without_waits(super().publish(), lambda wait: wait.word == "done" and wait.rank not in self.t.peers)


class GathersAtOnce(RankProtocol):
    def gather(self, group: int, into: Any, *, own: bool = False) -> Steps:
        return without_waits(super().gather(group, into, own=own), lambda wait: wait.word == "published")


class ExtraPublishForgetsDone(RankProtocol):
    """Does not settle the epoch in between: the other ranks never see it finished."""

    def publish(self) -> Steps:
        return (e for e in super().publish() if not (isinstance(e, Store) and e.word == "done"))


class DoneBeforeTheSum(RankProtocol):
    def settle(self, read_word: ReadWord) -> Steps:
        yield Store("done", 0, self.epoch)
        yield from super().settle(read_word)


class ReadyBeforeComplete(RankProtocol):
    def declare(self, group: int) -> Steps:
        effects = list(super().declare(group))
        yield from reversed(effects)


class DeclaresData(RankProtocol):
    """Says ``2k + 1`` for a group it has nothing for, so that an older epoch's gradients are pulled."""

    def declare(self, group: int) -> Steps:
        for effect in super().declare(group):
            yield Store(effect.word, effect.index, effect.value | 1) if isinstance(effect, Store) else effect


class IgnoresCredit(Pushes):
    def _has_slot(self, owner: int, read_word: ReadWord) -> bool:
        return True


class CreditOffByOne(Pushes):
    def _has_slot(self, owner: int, read_word: ReadWord) -> bool:
        return read_word(owner, "tail", self._t.rank) >= self._heads[owner] - self._slots


class WaitsForCreditOffByOne(Pushes):
    def push_kept(self, owner: int, epoch: int, read_word: ReadWord, *, wait: bool = False) -> Steps:
        for effect in super().push_kept(owner, epoch, read_word, wait=wait):
            yield dataclasses.replace(effect, at_least=effect.at_least - 1) if isinstance(effect, Wait) else effect


class HeadBeforePush(Pushes):
    def _push(self, owner: int, push: Callable[[int], None]) -> Steps:
        yield from reversed(list(super()._push(owner, push)))


class AddsToWhatIsHalfPushed(Pushes):
    def push_or_keep(self, owner: int, group: int, epoch: int, piece: Any, read_word: ReadWord) -> Steps:
        halves = [(kept, kept.pushed) for kept in self._kept[owner] if kept.pushed and kept.group == group]
        if not halves:
            return (yield from super().push_or_keep(owner, group, epoch, piece, read_word))
        for kept, _ in halves:
            kept.pushed = 0
        effects = list(super().push_or_keep(owner, group, epoch, piece, lambda *_: -1))  # no slot: it is kept
        for kept, pushed in halves:
            kept.pushed = pushed
        yield from effects


class SaysReadyOfWhatIsKept(Pushes):
    def keeps(self, group: int | None = None) -> bool:
        return False


def pushing(pushes: type[Pushes]) -> type[RankProtocol]:
    """The protocol with another way of pushing."""

    class WithPushes(RankProtocol):
        def __init__(self, topology: Topology, plane: DataPlane, mode: str, slots: int = 0) -> None:
            super().__init__(topology, plane, mode, slots)
            self.pushes = pushes(topology, plane, slots)

    return WithPushes


class NeverPushesWhatIsKept(RankProtocol):
    def settle(self, read_word: ReadWord) -> Steps:
        self.pushes._kept = {owner: [] for owner in self.pushes.owners}
        return super().settle(read_word)


class SettlesWithoutArrivals(RankProtocol):
    def settle(self, read_word: ReadWord) -> Steps:
        return without_waits(super().settle(read_word), lambda wait: wait.word == "tail")


class SettlesWithoutReady(RankProtocol):
    def settle(self, read_word: ReadWord) -> Steps:
        return without_waits(super().settle(read_word), lambda wait: wait.word == "ready")


class ReadsHeadBeforeReady(RankProtocol):
    def settle(self, read_word: ReadWord) -> Steps:
        heads = {r: read_word(r, "head", self.t.rank) for r in self.t.peers}
        return super().settle(lambda rank, word, index: heads[rank] if word == "head" else read_word(rank, word, index))


def believing(**words: int) -> type[RankProtocol]:
    """Delivers before settle as if these words had got there."""

    class Believes(RankProtocol):
        def deliver_complete(self, read_word: ReadWord) -> Steps:
            return super().deliver_complete(lambda rank, word, index: words.get(word, read_word(rank, word, index)))

    return Believes


class DeliversEarlyWhatItAddsTo(RankProtocol):
    def deliver_complete(self, read_word: ReadWord) -> Steps:
        declared, self.declared = self.declared, [True] * len(self.declared)
        steps = list(super().deliver_complete(read_word))
        self.declared = declared
        yield from steps


class ServesDoneBeforeHead(RankProtocol):
    def serve(self, read_word: ReadWord, source: int) -> Steps:
        done = read_word(self.t.rank, "done", 0)
        return super().serve(lambda rank, word, index: done if word == "done" else read_word(rank, word, index), source)


class FreesSlotsEarly(RankProtocol):
    def serve(self, read_word: ReadWord, source: int) -> Steps:
        effects = list(super().serve(read_word, source))
        yield from (effect for effect in effects if isinstance(effect, Store))
        yield from (effect for effect in effects if not isinstance(effect, Store))


class ResetsAtBegin(RankProtocol):
    """The accumulator is cleared when the rank begins its minibatch, when faster ranks may have pushed already."""

    def begin(self) -> None:
        super().begin()
        self.plane.reset_sums()  # type: ignore[attr-defined]


class ReadsTailBack(RankProtocol):
    """Takes its own tail from the word, which a device stores later than the host goes on."""

    def serve(self, read_word: ReadWord, source: int) -> Steps:
        self._tails[source] = read_word(self.t.rank, "tail", source)
        yield from super().serve(read_word, source)


class ResettingPlane(SimPlane):
    def reset_sums(self) -> None:
        for group in range(self.w.scenario.groups):
            self.w.accumulators[(self.rank, group)] = (0, [])


class KeepsOldSums(SimPlane):
    """The first piece of an epoch does not start the accumulator anew."""

    def _add(self, group: int, epoch: int, piece: Token) -> None:
        _, tokens = self.w.accumulators.get((self.rank, group), (0, []))
        self.w.accumulators[(self.rank, group)] = (epoch, [*tokens, piece])


class SummedBeforeArrivals(RankProtocol):
    """Lets the replicas read the accumulators before they are complete."""

    def settle(self, read_word: ReadWord) -> Steps:
        for group in range(len(self.t.groups)):
            yield Store("summed", group, self.epoch)
        yield from super().settle(read_word)


class KeepsUnsharded(SimPlane):
    def reshard(self) -> None:
        self.finish = None


LOCAL, OWNER, HSDP = Scenario(3, "local"), Scenario(3, "owner", slots=2), Scenario(4, "local", replicas=2)
MUTANTS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "publish without waiting for done, local": (LOCAL, {"protocol": PublishesAtOnce}),
    "publish without waiting for done, owner": (OWNER, {"protocol": PublishesAtOnce}),
    "publish waits inside its replica only": (HSDP, {"protocol": WaitsInOwnReplicaOnly}),
    "publish waits inside its replica only, owner": (dataclasses.replace(HSDP, mode="owner"), {"protocol": WaitsInOwnReplicaOnly}),
    "gather without waiting for published": (LOCAL, {"protocol": GathersAtOnce}),
    "extra publish forgets done": (LOCAL, {"protocol": ExtraPublishForgetsDone}),
    "done before the sum": (LOCAL, {"protocol": DoneBeforeTheSum}),
    "done before the sum, owner": (OWNER, {"protocol": DoneBeforeTheSum}),
    "ready before complete": (LOCAL, {"protocol": ReadyBeforeComplete}),
    "ready with data where there is none": (LOCAL, {"protocol": DeclaresData}),
    "ring credit ignored": (OWNER, {"protocol": pushing(IgnoresCredit)}),
    "ring credit off by one": (OWNER, {"protocol": pushing(CreditOffByOne)}),
    "ring credit off by one where it is waited for": (OWNER, {"protocol": pushing(WaitsForCreditOffByOne)}),
    "head before the piece": (OWNER, {"protocol": pushing(HeadBeforePush)}),
    "adding to a kept sum that is half pushed": (OWNER, {"protocol": pushing(AddsToWhatIsHalfPushed)}),
    "ready while something is kept": (OWNER, {"protocol": pushing(SaysReadyOfWhatIsKept)}),
    "kept sums forgotten": (OWNER, {"protocol": NeverPushesWhatIsKept}),
    "settle without waiting for arrivals": (OWNER, {"protocol": SettlesWithoutArrivals}),
    "settle without waiting for ready, owner": (OWNER, {"protocol": SettlesWithoutReady}),
    "settle reads the head before ready": (OWNER, {"protocol": ReadsHeadBeforeReady}),
    "early delivery without arrivals": (OWNER, {"protocol": believing(tail=1 << 40)}),
    "early delivery without ready": (OWNER, {"protocol": believing(ready=1 << 40)}),
    "early delivery without summed": (dataclasses.replace(HSDP, mode="owner"), {"protocol": believing(summed=1 << 40)}),
    "early delivery of a group that is added to": (OWNER, {"protocol": DeliversEarlyWhatItAddsTo}),
    "serve reads done before head": (dataclasses.replace(OWNER, world_size=2), {"protocol": ServesDoneBeforeHead}),
    "slots freed before they are added": (OWNER, {"protocol": FreesSlotsEarly}),
    "own tail read back from the word": (OWNER, {"protocol": ReadsTailBack}),
    "accumulator reset at begin": (OWNER, {"protocol": ResetsAtBegin, "plane": ResettingPlane}),
    "accumulator never reset": (OWNER, {"plane": KeepsOldSums}),
    "summed before arrivals": (dataclasses.replace(HSDP, mode="owner"), {"protocol": SummedBeforeArrivals}),
    "publish keeps unsharded parameters": (LOCAL, {"plane": KeepsUnsharded}),
    "exchange with one place": (dataclasses.replace(LOCAL, epochs=4), {"parities": lambda parity: 0}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str) -> None:
    scenario, variants = MUTANTS[name]
    with pytest.raises(Violation):
        for seed in range(MUTANT_SCHEDULES):
            explore(dataclasses.replace(scenario, seed=seed), seed, **variants)
