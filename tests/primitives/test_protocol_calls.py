"""One rank's calls of the protocol: their order, and what they say and do at which moment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from primus_odc.errors import ProtocolError
from primus_odc.primitives.effects import Do, Effect, Steps, Store, Wait
from primus_odc.primitives.protocol import RankProtocol
from primus_odc.primitives.topology import Topology


class NoPlane:
    """Accepts and ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def alone(mode: str = "local") -> RankProtocol:
    return RankProtocol(Topology(0, 1, [0], [0], ["embedding"], ["rank 5"]), NoPlane(), mode)


def run(steps: Generator[Effect, None, None] | Iterator[Effect]) -> list[Effect]:
    return list(steps)


def settled(protocol: RankProtocol) -> None:
    run(protocol.publish())
    protocol.begin()
    run(protocol.settle(lambda *_: 0))


@pytest.mark.parametrize(
    ("prepare", "call", "message"),
    [
        (lambda p: None, lambda p: run(p.gather(0, None)), r"gather of group embedding is not possible in epoch 0.*publish\(\)"),
        (settled, lambda p: run(p.gather(0, None)), r"rank 5: gather of group embedding is not possible in epoch 1, state 'settled'"),
        (settled, lambda p: p.begin(), r"begin_minibatch is not possible.*publish\(\)"),
        (settled, lambda p: run(p.settle(lambda *_: 0)), "settle is not possible"),
        (
            lambda p: run(p.publish()),
            lambda p: run(p.reduce_local(0, None)),
            r"reduction of group embedding.*begin_minibatch\(\) first",
        ),
        (lambda p: run(p.publish()), lambda p: run(p.settle(lambda *_: 0)), r"settle is not possible.*call begin_minibatch\(\) first"),
        (lambda p: (run(p.publish()), p.begin()), lambda p: run(p.publish()), r"publish is not possible.*call settle\(\) first"),
        (lambda p: (run(p.publish()), p.begin()), lambda p: p.begin(), r"begin_minibatch is not possible.*call settle\(\) first"),
        (lambda p: (run(p.publish()), p.begin()), lambda p: run(p.close()), r"detach is not possible.*call settle\(\) first"),
        (lambda p: run(p.close()), lambda p: run(p.publish()), "publish is not possible.*the engine is detached"),
        (
            lambda p: (run(p.publish()), p.begin(), run(p.declare(0))),
            lambda p: run(p.reduce_local(0, None)),
            r"rank 5: gradients of group embedding arrived after.*epoch 1.*last_microbatch\(\)",
        ),
        (lambda p: (run(p.publish()), p.begin(), run(p.declare(0))), lambda p: run(p.reduce_owner(0, [], lambda *_: 0)), "arrived after"),
    ],
)
def test_calls_in_the_wrong_order_are_refused(
    prepare: Callable[[RankProtocol], Any], call: Callable[[RankProtocol], Any], message: str
) -> None:
    protocol = alone()
    prepare(protocol)
    with pytest.raises(ProtocolError, match=message):
        call(protocol)


def reached(begun: int) -> Callable[[int, str, int], int]:
    return lambda rank, word, index: begun if (rank, word) == (1, "begun") else 0


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (RankProtocol.publish, "publish()"),
        (RankProtocol.close, "detach()"),
        (lambda p: p.exchange(lambda parity: None, "norm"), "a gradient norm"),
    ],
)
def test_a_call_that_others_will_not_make_any_more_is_told(call: Callable[[RankProtocol], Any], says: str, published: bool) -> None:
    protocol = RankProtocol(Topology(0, 2, [0, 1], [0], ["g"], ["rank 5", "rank 7"]), NoPlane(), "local")
    settled(protocol)
    if published:
        run(protocol.publish())
    (wait,) = [effect for effect in call(protocol) if isinstance(effect, Wait)]
    if says == "publish()" and not published:
        assert wait.in_vain is None  # the others may well be in the minibatch before
        return
    assert wait.in_vain is not None and wait.in_vain(reached(1)) == ""
    assert f"rank 7 began minibatch 2 without {says}" in wait.in_vain(reached(2))


def test_complete_groups_are_delivered_before_settle_and_once() -> None:
    delivered: list[int] = []
    plane: Any = NoPlane()
    plane.deliver = delivered.append
    words = {("ready", 1): 2, ("ready", 0): 0}

    def read_word(rank: int, word: str, index: int) -> int:
        return words.get((word, index), 0)

    def go(steps: Steps) -> None:
        for effect in steps:
            if isinstance(effect, Wait):
                assert read_word(effect.rank, effect.word, effect.index) >= effect.at_least
            elif isinstance(effect, Do):
                effect.action()

    protocol = RankProtocol(Topology(0, 2, [0, 1], [0], ["embedding", "head"], ["rank 5", "rank 7"]), plane, "owner", slots=2)
    list(protocol.publish())
    protocol.begin()
    go(protocol.deliver_complete(read_word))
    assert delivered == []  # this rank still adds to it
    go(protocol.declare(1))
    go(protocol.deliver_complete(read_word))
    go(protocol.deliver_complete(read_word))
    assert delivered == [1]
    go(protocol.declare(0))
    go(protocol.deliver_complete(read_word))
    assert delivered == [1]  # rank 7 does
    words["ready", 0] = 2
    go(protocol.settle(read_word))
    assert delivered == [1, 0]


def test_ready_says_whether_there_is_data_and_is_said_once() -> None:
    protocol = alone()
    run(protocol.publish())
    protocol.begin()
    run(protocol.reduce_local(0, None))
    assert [e for e in run(protocol.declare(0)) if isinstance(e, Store)] == [Store("ready", 0, 3)]
    assert run(protocol.declare(0)) == []
    assert Store("ready", 0, 3) not in run(protocol.settle(lambda *_: 3))
    run(protocol.publish())
    protocol.begin()
    assert run(protocol.declare(0)) == [Store("ready", 0, 4)]
