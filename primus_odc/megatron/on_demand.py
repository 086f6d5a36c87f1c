"""The on-demand engine with its transfers on a clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from primus_odc.config import OdcConfig
from primus_odc.fsdp.engine import Engine
from primus_odc.fsdp.gather import Into
from primus_odc.megatron.meter import Meter
from primus_odc.primitives.contribution import Contribution
from primus_odc.report.timeline import SpanKind


class MeteredEngine(Engine):
    """An :class:`Engine` whose every call that waits or moves data is a span of ``meter``, with the waiting inside it told apart."""

    def __init__(self, model: nn.Module, config: OdcConfig, meter: Meter) -> None:
        """See :func:`primus_odc.attach`."""
        self._meter = meter
        super().__init__(model, config)

    def settle(self) -> None:
        with self._timed("settle"):
            super().settle()

    def publish(self) -> None:
        with self._timed("publish"):
            super().publish()

    def gather(self, group: int, into: Into, own: torch.Tensor | None) -> None:
        with self._timed("communication", "gather"):
            super().gather(group, into, own)

    def reduce(self, group: int, contribution: Contribution) -> None:
        with self._timed("communication", "reduction"):
            super().reduce(group, contribution)

    @contextmanager
    def _timed(self, kind: SpanKind, operation: str = "") -> Iterator[None]:
        # The label names the rank: a one-sided transfer has no counterpart on the others.
        label = operation and f"{operation} by rank {self.rank}"
        recorder = self._meter.recorder
        with self._meter.span(kind, label=label):
            if recorder is None:
                yield
                return
            start, before = time.perf_counter(), self._waited_s()
            yield
            waited = self._waited_s() - before
            if waited > 0.0:
                # Waiting comes first: the data of a peer that is there are copied at once.
                recorder.add("wait", start, start + waited, label=label)

    def bytes_moved(self) -> tuple[int, int]:
        """Parameter bytes gathered from other ranks and gradient bytes pulled or pushed, since the engine was made."""
        totals = self.totals()
        return totals["bytes_gathered"], totals["bytes_reduced"]

    def collectives(self) -> int:
        """The engine's own since it was made."""
        return int(self.totals()["collectives"])

    def _waited_s(self) -> float:
        waited: float = sum(self.totals()["waited_s"].values())
        return waited
