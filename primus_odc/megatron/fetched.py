"""Numbers of a device on their way to the host."""

from __future__ import annotations

import torch


class Fetched:
    """A copy of a tensor, queued on the current stream at once and waited for when it is read: what was queued before it has to end, what
    is queued after it need not. On a CPU it is there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """The copy, in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
