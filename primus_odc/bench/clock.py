"""Moments of a rank's work: of the device where there is one, else of the host.

On a GPU a mark is an event in the current stream: the moment at which the device gets there, not the moment at which the host queued it. So
the time between two marks holds what the device did or waited for, and of the host's own time only what the device had to wait for.
Marks of different ranks are compared through a first mark made right after all of them met.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Makes marks; ``ms`` may be asked after :meth:`synchronize` only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now, for :meth:`ms`."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def on_device(self) -> bool:
        """Whether marks are events of a device."""
        return self._device.type != "cpu"

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to a later one."""
        if self._device.type == "cpu":
            return 1e3 * float(end - start)
        return float(start.elapsed_time(end))

    def synchronize(self) -> None:
        """Wait until the device has done all that is queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
