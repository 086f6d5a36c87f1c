"""What a device finds about norms of different kinds, told by a host that does not wait; stand-ins for the device and its events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primus_odc.errors import ProtocolError
from primus_odc.fsdp.norm import NormCheck


class Event:
    """An event of a device; ``over``: it has come so far."""

    def __init__(self) -> None:
        self.over = True

    def query(self) -> bool:
        return self.over

    def record(self) -> None:
        self.over = False


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> tuple[NormCheck, Event]:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, **_: zeros(*shape, dtype=dtype))
    event = Event()
    lanes: Any = SimpleNamespace(event=lambda: event, record=lambda recorded: recorded.record())
    mesh: Any = SimpleNamespace(names=["rank 0", "rank 1"], rank=1)
    return NormCheck(mesh, lanes, torch.device("cuda")), event


def test_equal_norms_are_no_matter(check: tuple[NormCheck, Event]) -> None:
    norms, event = check
    norms.require_same()  # before any norm
    for _ in range(3):
        norms.collect(torch.tensor(False))
        norms.require_same()
        event.over = True
        norms.require_same()


def test_a_difference_is_told_once_its_copy_has_arrived(check: tuple[NormCheck, Event]) -> None:
    norms, event = check
    norms.collect(torch.tensor(True))
    norms.require_same()  # on its way
    event.over = True
    with pytest.raises(ProtocolError, match="rank 1: this rank took a norm, and other ranks took another one"):
        norms.require_same()


def test_a_difference_found_while_a_copy_is_on_its_way_is_not_lost(check: tuple[NormCheck, Event]) -> None:
    norms, event = check
    norms.collect(torch.tensor(False))
    norms.collect(torch.tensor(True))  # the first copy is on its way, and does not have it
    event.over = True
    norms.require_same()
    norms.collect(torch.tensor(False))
    event.over = True
    with pytest.raises(ProtocolError, match="took another one"):
        norms.collect(torch.tensor(False))
