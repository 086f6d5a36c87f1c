"""What a GPU promises about a network card's writes, and who needs what."""

from __future__ import annotations

import pytest
import torch

from primus_odc.errors import OdcError
from primus_odc.symmetric.shmem import write_order
from primus_odc.symmetric.shmem.write_order import ALL_DEVICES, OWNER, needs_relay

GPU = torch.device("cuda", 3)


def answers(monkeypatch: pytest.MonkeyPatch, found: int, *, flush: bool) -> None:
    monkeypatch.setattr(write_order, "writes_ordering", lambda device: found)
    monkeypatch.setattr(write_order, "can_flush", lambda device: flush)


@pytest.mark.parametrize(
    "found, read_by_mates, relay", [(ALL_DEVICES, True, False), (ALL_DEVICES, False, False), (OWNER, False, False), (OWNER, True, True)]
)
def test_who_shows_its_words_itself(monkeypatch: pytest.MonkeyPatch, found: int, read_by_mates: bool, relay: bool) -> None:
    answers(monkeypatch, found, flush=relay)
    assert needs_relay(GPU, "rank 3", read_by_mates=read_by_mates) is relay


@pytest.mark.parametrize(
    "found, read_by_mates, said",
    [
        (OWNER, True, "to OWNER, and its driver has no flush for the host, which is needed where GPUs of a node read each other's memory"),
        (0, True, "to NONE: odc.transport: nvshmem cannot be used between these machines; set comm_backend: nccl_pad"),
        (0, False, "to NONE: odc.transport: nvshmem cannot be used between these machines"),
    ],
)
def test_too_little_is_refused(monkeypatch: pytest.MonkeyPatch, found: int, read_by_mates: bool, said: str) -> None:
    answers(monkeypatch, found, flush=False)
    with pytest.raises(OdcError) as caught:
        needs_relay(GPU, "rank 3", read_by_mates=read_by_mates)
    assert str(caught.value).startswith("rank 3: cuda:3 promises the order of a network card's writes " + said)
