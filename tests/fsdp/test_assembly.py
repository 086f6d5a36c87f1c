"""A rank that cannot attach does not leave the others to guess, and its model is FSDP2's as before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import primus_odc
from primus_odc.errors import OdcError, PeerTimeoutError
from primus_odc.fsdp import assembly, engine
from primus_odc.fsdp.edits import EditCheck
from primus_odc.primitives.driver import ProgressThread
from tests.fsdp.models import loss_of, microbatch, shard, tiny_model
from tests.workers import run_workers


def _no_room(*arguments: Any, **options: Any) -> None:
    raise MemoryError("no room for the sums")


def in_its_plane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assembly, "ArenaPlane", _no_room)


def in_its_checks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "NormCheck", _no_room)


def in_its_checks_with_a_thread_that_does_not_end(patch: pytest.MonkeyPatch) -> None:
    in_its_checks(patch)

    def does_not_end(thread: ProgressThread) -> None:
        thread._finalizer()
        raise PeerTimeoutError("the thread does not end")

    patch.setattr(ProgressThread, "stop", does_not_end)


def in_its_publication(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EditCheck, "require_none", _no_room)


def in_its_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("primus_odc.fsdp.preparation.find_units", _no_room)


def _attach(rank: int, world_size: int, where: Callable[[pytest.MonkeyPatch], None], options: dict[str, Any]) -> tuple[str, float, int]:
    """What was told, after how many seconds, and how many hooks it left behind on the model."""
    patch = pytest.MonkeyPatch()
    if rank == 1:
        where(patch)
    model = shard(tiny_model())
    model(torch.zeros(1, 5))
    before = _hooks(model)
    begin = time.monotonic()
    try:
        made = primus_odc.attach(model, timeout_s=20, **options)
        made.begin_minibatch(0)
        made.settle()  # which needs every rank
    except (OdcError, MemoryError) as error:
        told = str(error)
    else:
        told = "settled"
    patch.undo()
    seconds = time.monotonic() - begin
    dist.barrier()
    left = _hooks(model) - before if rank == 1 else 0
    assert rank == 0 or not any(module in engine._ATTACHED for module in model.modules())
    if where is in_its_model:  # which happens before anything is shared: collectives are FSDP2's again on all ranks
        loss_of(model, *microbatch(0, rank, 0), 1).backward()
        second = primus_odc.attach(model)
        second.begin_minibatch(0)
        second.settle()
        second.detach()
    return told, seconds, left


def _hooks(model: torch.nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")
    modules = sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
    return modules + sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters())


@pytest.mark.parametrize("where", [in_its_plane, in_its_checks, in_its_publication, in_its_model])
@pytest.mark.parametrize("options", [{"accumulate": "local"}, {"accumulate": "owner"}], ids=["local", "owner"])
def test_a_rank_that_cannot_attach_tells_the_others_why(where: Callable[[pytest.MonkeyPatch], None], options: dict[str, Any]) -> None:
    (others, seconds, _), (told, _, left) = run_workers(_attach, 2, where, options)
    assert told == "no room for the sums"
    if where is in_its_model:
        assert "attach failed elsewhere: rank 1" in others and "no room for the sums" in others
    else:
        what = "publish of all groups" if where is in_its_publication else "attach"
        assert any(f"rank 1 {how}: {what}: no room for the sums" in others for how in ("died after", "aborted")), others
    assert seconds < 15  # not odc.timeout_s
    assert left == 0


def test_nothing_is_left_where_the_progress_thread_does_not_end() -> None:
    (others, seconds, _), (told, _, left) = run_workers(_attach, 2, in_its_checks_with_a_thread_that_does_not_end, {"accumulate": "owner"})
    assert told == "the thread does not end" and left == 0
    assert "no room for the sums" in others and seconds < 15


def _in_inference_mode(rank: int, world_size: int) -> str:
    with torch.inference_mode() if rank == 1 else contextlib.nullcontext(), pytest.raises(OdcError) as caught:
        primus_odc.attach(shard(tiny_model()), timeout_s=20)
    return str(caught.value)


def test_a_refusal_of_one_rank_is_told_to_all() -> None:
    other, refused = run_workers(_in_inference_mode, 2)
    assert "inference mode" in refused
    assert "attach failed elsewhere: rank 1" in other and refused in other
