"""A rank on which the engine cannot be put together does not leave the others to guess."""

from __future__ import annotations

from typing import Any

import pytest

import primus_odc
from primus_odc.errors import OdcError
from primus_odc.fsdp import assembly
from tests.fsdp.models import shard, tiny_model
from tests.workers import run_workers


def _attach(rank: int, world_size: int) -> str:
    def no_room(*arguments: Any, **options: Any) -> None:
        raise MemoryError("no room for the sums")

    if rank == 1:
        pytest.MonkeyPatch().setattr(assembly, "ArenaPlane", no_room)
    try:
        engine = primus_odc.attach(shard(tiny_model()), timeout_s=10)
        engine.begin_minibatch(0)
        engine.settle()  # which needs every rank
    except (OdcError, MemoryError) as error:
        return str(error)
    return "settled"


def test_a_rank_that_cannot_put_the_engine_together_tells_the_others_why() -> None:
    others, told = run_workers(_attach, 2)
    assert told == "no room for the sums"
    assert "rank 1 died after: attach: no room for the sums" in others or "rank 1 aborted: attach: no room for the sums" in others
