"""Far words that their owner shows, where mates may not look at its memory: a network card's writes are in order for the owner only."""

from __future__ import annotations

from primus_odc.errors import OdcError
from primus_odc.symmetric.heap import SymmetricHeap
from tests.symmetric.machine_ranks import OPERATION, TWO_AND_ONE, TWO_BY_TWO, Start, hosts, send, start

__all__ = ["hosts", "start"]


def _receive_shown(heap: SymmetricHeap, writer: int, epoch: int, home: int) -> tuple[int, int]:
    heap.wait(writer, "came", writer, epoch, OPERATION, home=home)
    data = heap.view(home, heap.plan.regions["data"])[1024 + 512 * writer :][:512]
    return int(data.min()), int(data.max())


def _no_order_of_values(heap: SymmetricHeap) -> str:
    heap.read(heap.rank, "number", 0, afresh=True)
    return "read"


def _make_nothing_visible(heap: SymmetricHeap) -> str:
    heap._network.make_visible = lambda: None  # type: ignore[union-attr,method-assign]
    return "done"


def _fail_to_make_visible(heap: SymmetricHeap) -> str:
    def refuse() -> None:
        raise OdcError("the driver refused to flush")

    heap._network.make_visible = refuse  # type: ignore[union-attr,method-assign]
    return "done"


def test_words_are_shown_when_what_they_cover_is_seen_by_all(start: Start) -> None:
    """Where a network card's writes are in order for the owner only: mates do not look themselves, the owner shows."""
    machine = start(TWO_BY_TWO, hides=True)
    for epoch in range(1, 12):
        assert machine.ask([0, 1], send, 2, epoch) == ["sent"] * 2
        for writer in (0, 1):
            assert machine.ask([2, 3], _receive_shown, writer, epoch, 2) == [(epoch, epoch)] * 2
    ((kind, text),) = machine.ask([3], _no_order_of_values)
    assert kind == "ProtocolError" and "number has no order of values" in text
    assert machine.ask([2], _make_nothing_visible) == ["done"]
    machine.ask([0], send, 2, 12)
    assert machine.ask([2, 3], _receive_shown, 0, 12, 2) == [(11, 11)] * 2  # the stand-in does hide what nobody made visible


def test_a_rank_that_cannot_show_its_words_fails_everywhere(start: Start) -> None:
    machine = start(TWO_AND_ONE, hides=True)
    assert machine.ask([0], _fail_to_make_visible) == ["done"]
    machine.ask([2], send, 0, 1)
    for kind, text in machine.ask([0, 1, 2], _waits_for_ever):
        assert kind == "PeerError" and "showing far words to the ranks of this node: the driver refused to flush" in text


def _waits_for_ever(heap: SymmetricHeap) -> None:
    heap.wait((heap.rank + 1) % heap.world_size, "mapped", 0, 99, OPERATION, home=heap.rank)
