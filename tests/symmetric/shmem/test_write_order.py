"""What a GPU promises about a network card's writes, and who needs what."""

from __future__ import annotations

import pytest
import torch

from primus_odc.errors import OdcError
from primus_odc.symmetric.shmem import write_order
from primus_odc.symmetric.shmem.write_order import ALL_DEVICES, OWNER, require_write_order

GPU = torch.device("cuda", 3)


@pytest.mark.parametrize("found, read_by_mates", [(ALL_DEVICES, True), (ALL_DEVICES, False), (OWNER, False)])
def test_enough_is_promised(monkeypatch: pytest.MonkeyPatch, found: int, read_by_mates: bool) -> None:
    monkeypatch.setattr(write_order, "writes_ordering", lambda device: found)
    require_write_order(GPU, "rank 3", read_by_mates=read_by_mates)


@pytest.mark.parametrize(
    "found, read_by_mates, said",
    [
        (OWNER, True, "to OWNER, and ALL_DEVICES is needed where GPUs of a node read each other's memory: set odc.ranks_per_node: 1"),
        (0, True, "to NONE, and ALL_DEVICES is needed: odc.transport: nvshmem cannot be used between these machines"),
        (0, False, "to NONE, and OWNER is needed: odc.transport: nvshmem cannot be used between these machines"),
    ],
)
def test_too_little_is_refused(monkeypatch: pytest.MonkeyPatch, found: int, read_by_mates: bool, said: str) -> None:
    monkeypatch.setattr(write_order, "writes_ordering", lambda device: found)
    with pytest.raises(OdcError) as caught:
        require_write_order(GPU, "rank 3", read_by_mates=read_by_mates)
    assert str(caught.value).startswith("rank 3: cuda:3 promises the order of a network card's writes " + said)
