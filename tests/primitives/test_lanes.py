"""What comes behind what in the streams of one rank, on a device that is a graph: an operation knows all that it waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primus_odc.primitives.lanes import Lanes


class Event:
    """The operations that are over when it is."""

    def __init__(self) -> None:
        self.before: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.before = stream.before


class Stream:
    """``before``: what the next operation comes behind."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.before: frozenset[str] = frozenset()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before

    def wait_event(self, event: Event) -> None:
        self.before |= event.before


class Device:
    """Stands in for :mod:`torch.cuda`."""

    def __init__(self) -> None:
        self.now = Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def run(self, name: str) -> frozenset[str]:
        """An operation on the current stream; what it comes behind."""
        before = self.now.before
        self.now.before = before | {name}
        return before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    module: Any = SimpleNamespace(Stream=Stream, Event=Event, stream=made.stream, current_stream=lambda device: made.now)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return made


def make_lanes() -> Lanes:
    return Lanes(torch.device("cuda", 0), 4, False)


def test_what_is_sent_comes_behind_the_settle_stream_and_holds_nothing_up(device: Device) -> None:
    lanes = make_lanes()
    device.run("backward")
    with lanes.on(lanes.settle, after_current=False):
        device.run("partial of group 1")
        with lanes.sending():
            assert device.run("put of group 1") == {"partial of group 1"}
        assert "put of group 1" not in device.run("sum of group 2")
        with lanes.sending():
            assert {"put of group 1", "sum of group 2"} <= device.run("put of group 0")  # in one order
        lanes.wait_for_transfers()
        assert {"put of group 0", "put of group 1"} <= device.run("done")


def test_the_word_that_a_node_is_done_does_not_wait_for_the_optimizer(device: Device) -> None:
    lanes = make_lanes()
    device.run("backward")
    with lanes.on(lanes.settle, after_current=False):
        lanes.wait_for_transfers()
        device.run("done")
    lanes.join(lanes.settle)
    device.run("optimizer")
    with lanes.sending():
        found = device.run("node_done")
    assert "done" in found and "optimizer" not in found


def test_after_an_evaluation_it_waits_for_what_that_has_read(device: Device) -> None:
    """No settle is between two publications then: the epoch ends in the caller's stream."""
    lanes = make_lanes()
    with lanes.gathering(), lanes.gather_copy():
        device.run("gather")
    lanes.wait_for_transfers()
    device.run("done")
    with lanes.sending():
        assert "gather" in device.run("node_done")


def test_shards_land_behind_their_publication_and_the_epoch_ends_behind_the_landing(device: Device) -> None:
    lanes = make_lanes()
    device.run("optimizer")
    device.run("publication")
    with lanes.on(lanes.settle), lanes.sending():
        assert "publication" in device.run("landing")
    assert "landing" not in device.run("forward")
    lanes.wait_for_transfers()
    assert "landing" in device.run("done")
