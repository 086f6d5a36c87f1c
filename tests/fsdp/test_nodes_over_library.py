"""The engine across nodes over a library (``odc.transport: nvshmem``) that a test plays: memory of other nodes is not mapped, everything
crosses through :class:`ShmemNetwork`, and ranks of other nodes are heard of over TCP.

The checks are those of :mod:`tests.fsdp.test_nodes`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import primus_odc
from tests.fsdp.checks import failures, run_checks
from tests.fsdp.models import loss_of, microbatch, shard, tiny_model
from tests.fsdp.test_nodes import CHECKS
from tests.symmetric.shmem.process_library import FileArena, play_library
from tests.workers import WorkerFailedError, run_workers

# What was put into a library's heap stays for the next engine, and is in no segment; the library serves one set of ranks in a process.
NOT_HERE = ("a_dropped_engine_is_freed", "memory_is_what_the_formula_says", "two_models_on_two_halves", "what_cannot_be_served_is_refused")
MADE: list[FileArena] = []
"""Arenas of this process."""


def everything_crosses_by_put_and_signal() -> None:
    """What arrives in another node was put there with a word behind it: as many words as the engine counts, and at least its bytes."""
    model = shard(tiny_model())
    engine = primus_odc.attach(model, ranks_per_node=1, verify="checksum")
    arena = MADE[-1]
    arena.puts.clear()
    for step in range(2):
        before = engine.totals()
        engine.begin_minibatch(1)
        x, y = microbatch(step, 0, 0)
        loss_of(model, x, y, 10).backward()
        engine.settle()
        engine.publish()
        model.zero_grad()
        totals = engine.totals()
        launches = [transfer for launch in arena.puts for transfer in launch]
        data = [nbytes for _, nbytes, _ in launches]
        words = [value for _, _, value in launches if value]
        assert totals["signals_across_nodes"] - before["signals_across_nodes"] == len(words) > 0
        crossed = totals["bytes_across_nodes"] - before["bytes_across_nodes"]
        checksums = 8 * (len(data) - sum(nbytes == 0 for nbytes in data)) // 2  # each behind its data
        assert crossed == sum(data) - checksums > 0
        arena.puts.clear()
    engine.detach()


def engines_follow_each_other_and_stand_side_by_side() -> None:
    models = [shard(tiny_model(seed)) for seed in range(2)]
    for _ in range(2):
        engines = [primus_odc.attach(model, ranks_per_node=1) for model in models]
        for step in range(2):
            for model, engine in zip(models, engines, strict=True):
                engine.begin_minibatch(1)
                x, y = microbatch(step, 0, 0)
                loss_of(model, x, y, 10).backward()
                engine.settle()
                assert all(bool(torch.isfinite(p.grad.to_local()).all()) for p in model.parameters())  # type: ignore[union-attr]
                model.zero_grad()
        for engine in engines:
            engine.detach()
    assert [hasattr(arena, "released") for arena in MADE[-4:]] == [True, True, False, False]


OWN: dict[int, dict[str, Callable[[], None]]] = {
    2: {f.__name__: f for f in (everything_crosses_by_put_and_signal, engines_follow_each_other_and_stand_side_by_side)}
}
ALL = {ranks: {**OWN.get(ranks, {}), **{k: f for k, f in CHECKS[ranks].items() if k not in NOT_HERE}} for ranks in CHECKS}


def _over_library(rank: int, world_size: int, folder: str) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        play_library(patch, rank, Path(folder), MADE)
        return run_checks(rank, world_size, ALL[world_size])


def _one_dies(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 is killed in the middle of a minibatch, with an engine detached before; the others must not wait for it in any way."""
    with pytest.MonkeyPatch.context() as patch:
        play_library(patch, rank, Path(folder), MADE)
        model = shard(tiny_model())
        primus_odc.attach(model, ranks_per_node=1, timeout_s=20).detach()
        engine = primus_odc.attach(model, ranks_per_node=1, timeout_s=20)
        for step in range(3):
            engine.begin_minibatch(1)
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = microbatch(step, rank, 0)
            loss_of(model, x, y, 10).backward()
            engine.settle()
            model.zero_grad()


@pytest.mark.timeout(90)
def test_a_killed_rank_of_another_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError) as failed:
        run_workers(_one_dies, 3, str(tmp_path), timeout_s=80)
    assert failed.value.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "rank 1 died (its process ended without a goodbye)" in failed.value.tracebacks[rank], failed.value


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, str]]]:
    return {}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("world_size", "name"), [(ranks, name) for ranks, checks in ALL.items() for name in checks])
def test_across_nodes(
    outcomes: dict[int, list[dict[str, str]]], tmp_path_factory: pytest.TempPathFactory, world_size: int, name: str
) -> None:
    if world_size not in outcomes:
        folder = tmp_path_factory.mktemp("arenas")
        outcomes[world_size] = run_workers(_over_library, world_size, str(folder), timeout_s=180)
    assert failures(outcomes[world_size], name) == ""
