"""The streams on which one rank's transfers run beside its compute. On a CPU they are torch's stand-ins: everything runs at once, in order.

Nothing here ever waits for a peer: what a stream waits for is other work of the same device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GATHER_STREAMS = 3
"""Copies from several peers run side by side: one copy engine alone does not fill the links."""


class Lanes:
    """Side streams of one device, and the events between them and the current stream.

    Attributes:
        settle: peers' gradients are pulled and summed here while backward runs.
        sends: what goes to other nodes, in one order. The sum of the next group does not wait for a transfer to be acknowledged. Of high
            priority as arrivals: a put takes one block.
        arrivals: (owner mode) pushed pieces are added here; never behind work of this rank's own microbatch, or credits would wait for it.
            Of high priority: a kernel of backward may run for milliseconds, and what is added here takes a small part of the device.
    """

    def __init__(self, device: torch.device, ranks: int, pushes: bool) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self.settle = self._stream()
        self.sends = self._stream(priority=-1)
        self._gathers = [self._stream() for _ in range(min(GATHER_STREAMS, max(1, ranks - 1)))]
        self._next_gather = 0
        self._compute: Any = None
        self._gathered = self.event()
        self._fork: Any = None
        self._used: list[Any] = []
        self._pushed = self.event()
        self._sent = self.event()
        self._finished = self.event()
        self._fork_of_pushes: Any = None
        self._pushing: list[Any] = []
        if pushes:
            self.arrivals = self._stream(priority=-1)
            self._pushes = [self._stream() for _ in range(ranks)]

    def _stream(self, priority: int = 0) -> Any:
        return self._module.Stream(self._device, priority=priority) if self._device.type != "cpu" else self._module.Stream()

    def event(self) -> Any:
        """A new event without timing."""
        return self._module.Event()

    def timing_mark(self) -> Any:
        """The moment at which the current stream gets here: an event with timing (on a device)."""
        event = self._module.Event(enable_timing=True) if self._device.type != "cpu" else self._module.Event()
        self.record(event)
        return event

    def compute_here(self) -> None:
        """A minibatch begins, and the current stream is the one the model computes in: its sums are delivered behind what that has been
        given so far, by the optimizer too."""
        self._compute = self.current()
        self.settle.wait_stream(self._compute)

    def compute_is_over(self) -> bool:
        """Whether the device has done what the host has given to that stream so far."""
        return self._compute is None or self._device.type == "cpu" or bool(self._compute.query())

    def record(self, event: Any) -> None:
        """``event`` is over when everything given to the current stream so far is."""
        event.record(self.current())

    def wait(self, event: Any) -> None:
        """What the current stream is given from here on comes after ``event``; an event never recorded is over."""
        self.current().wait_event(event)

    def current(self) -> Any:
        return self._module.current_stream(self._device) if self._device.type != "cpu" else self._module.current_stream()

    @contextmanager
    def on(self, stream: Any, *, after_current: bool = True) -> Iterator[None]:
        """Run the block on ``stream``; ``after_current``: behind what the current stream has been given so far."""
        if after_current:
            stream.wait_stream(self.current())
        with self._module.stream(stream):
            yield

    def join(self, stream: Any) -> None:
        """The current stream goes on after ``stream``."""
        self.current().wait_stream(stream)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around one gather: its copies fork from the current stream, side by side, and join it again."""
        self._fork = self.event()
        self.record(self._fork)
        try:
            yield
        finally:
            for stream in self._used:
                self.join(stream)
            self._used.clear()
            self.record(self._gathered)

    @contextmanager
    def gather_copy(self) -> Iterator[None]:
        """One owner's copy inside :meth:`gathering`."""
        stream = self._gathers[self._next_gather % len(self._gathers)]
        self._next_gather += 1
        stream.wait_event(self._fork)
        self._used.append(stream)
        with self._module.stream(stream):
            yield

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Around the pushes of one reduction: they fork from the current stream, whose memory they read, one stream for each owner, and
        join it again."""
        self._fork_of_pushes = self.event()
        self.record(self._fork_of_pushes)
        try:
            yield
        finally:
            for stream in self._pushing:
                self.join(stream)
            self._pushing.clear()
            self.record(self._pushed)

    @contextmanager
    def push_to(self, owner: int) -> Iterator[None]:
        """The pushes to one owner inside :meth:`pushing`."""
        stream = self._pushes[owner]
        stream.wait_event(self._fork_of_pushes)
        self._pushing.append(stream)
        with self._module.stream(stream):
            yield

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around what is given to :attr:`sends`: behind :attr:`settle` and the end of the epoch before, not behind the optimizer that the
        caller's stream may still be busy with, or all nodes would wait for it."""
        self.sends.wait_stream(self.settle)
        self.sends.wait_event(self._finished)
        with self._module.stream(self.sends):
            yield
            self.record(self._sent)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A progress thread's whole life: what it adds goes to :attr:`arrivals`."""
        if self._device.type != "cpu":
            self._module.set_device(self._device)  # the current device is a thread's own
        with self._module.stream(self.arrivals):
            yield

    def wait_for_pushes(self) -> None:
        """What the current stream is given from here on comes after every push started so far."""
        self.wait(self._pushed)

    def wait_for_transfers(self) -> None:
        """What the current stream is given from here on comes after every gather, push and send started so far: the epoch is finished."""
        self.wait(self._gathered)
        self.wait(self._pushed)
        self.wait(self._sent)
        self.record(self._finished)
