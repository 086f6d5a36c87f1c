"""The engine across nodes (``ranks_per_node`` on the host transport, which plays the network): gradients against one process in fp64.

What a training loop does is checked by the very checks of :mod:`tests.fsdp.test_loop`, with every engine spread over nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import primus_odc
from primus_odc.errors import ConfigError
from primus_odc.planning.traffic import GroupBytes, two_level
from tests.fsdp.checks import failures, run_checks
from tests.fsdp.models import check_gradients, loss_of, microbatch, rows, shard, tiny_model
from tests.fsdp.test_loop import ON_FOUR, ON_TWO, _counted_collectives, _meshes_of_two_by_two
from tests.workers import run_workers

MODES: list[dict[str, Any]] = [
    {"parameters": "reshard"},
    {"parameters": "resident", "deterministic": True},
    {"parameters": "reshard", "verify": "checksum"},
    {"parameters": "resident", "verify": "reference"},
]
COUNTS = {3: [[3, 1, 0], [0, 2, 1], [0, 0, 4]], 4: [[3, 1, 0, 2], [0, 0, 5, 1], [0, 0, 0, 0], [1, 1, 1, 1]]}


def gradients_in_all_modes() -> None:
    for options in MODES:
        assert check_gradients(tiny_model, COUNTS[dist.get_world_size()], {**options, "ranks_per_node": 2}) <= 1e-6, options


def gradients_on_all_meshes() -> None:
    """Shard groups within a node, across nodes, permuted; gathers by the smaller group of ``reshard_after_forward``."""
    meshes = [*_meshes_of_two_by_two(), DeviceMesh("cpu", [2, 0, 3, 1])]
    for mesh, options in ((mesh, options) for mesh in meshes for options in MODES[1:3]):
        assert check_gradients(tiny_model, COUNTS[4], {**options, "ranks_per_node": 2}, mesh) <= 1e-6, (mesh, options)
    assert check_gradients(tiny_model, COUNTS[4], {"ranks_per_node": 2}, None, {"reshard_after_forward": 2}) <= 1e-6


def gradients_on_nodes_of_three_and_one() -> None:
    assert check_gradients(tiny_model, COUNTS[4], {"ranks_per_node": 3}) <= 1e-6


def only_settle_and_publish_move_anything_across() -> None:
    """One reduction a minibatch, whatever the number of microbatches: the bytes and messages of :mod:`primus_odc.planning.traffic`. No
    collective, and nothing at all crosses in forward and backward."""
    for mesh in (None, *_meshes_of_two_by_two()):
        model = shard(tiny_model(), mesh)
        engine = primus_odc.attach(model, ranks_per_node=2)
        moved = []
        with _counted_collectives() as calls:
            for step, count in enumerate((1, 4, 2)):
                engine.begin_minibatch(count)
                crossed = engine.totals()["bytes_across_nodes"]
                for i in range(count):
                    x, y = microbatch(step, dist.get_rank(), i)
                    loss_of(model, x, y, rows(step, [count] * 4)).backward()
                assert engine.totals()["bytes_across_nodes"] == crossed
                engine.settle()
                engine.clip_grad_norm_(1.0)
                moved.append((engine.stats()["bytes_across_nodes"], engine.stats()["signals_across_nodes"]))
                model.zero_grad()
            engine.publish()
        assert calls == []
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, (engine.rank, moved))
        by_rank = dict(everyone)
        groups = [GroupBytes(unit.spec.shard_nbytes, unit.spec.grad_nbytes) for unit in engine._units]
        nodes = [[engine_rank for engine_rank, _ in everyone[first : first + 2]] for first in (0, 2)]
        for ranks, expected in zip(nodes, two_level(nodes, engine._mesh.shards, groups), strict=True):
            for step in range(3):
                found = [sum(by_rank[rank][step][what] for rank in ranks) for what in (0, 1)]
                assert found == [expected.out, expected.messages], (mesh, ranks)
        engine.detach()


def two_runs_agree_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        model = shard(tiny_model())
        engine = primus_odc.attach(model, ranks_per_node=2)
        optimizer = torch.optim.AdamW(model.parameters())
        for step, counts in enumerate(COUNTS[4]):
            engine.begin_minibatch(counts[dist.get_rank()])
            for i in range(counts[dist.get_rank()]):
                x, y = microbatch(step, dist.get_rank(), i)
                loss_of(model, x, y, max(rows(step, counts), 1)).backward()
            engine.settle()
            engine.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        found.append(torch.cat([p.to_local().reshape(-1) for p in model.parameters()]))  # type: ignore[attr-defined]
    assert torch.equal(*found)


def what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks_per_node: 2 spreads these ranks over 2 nodes, and odc.accumulate: owner"):
        primus_odc.attach(shard(tiny_model()), ranks_per_node=2, accumulate="owner")
    engine = primus_odc.attach(shard(tiny_model()), ranks_per_node=2, memory_budget_gib=1e-9)
    assert (engine.choices.accumulate, engine.choices.nodes) == ("local", 2)
    engine.detach()
    engine = primus_odc.attach(shard(tiny_model()), ranks_per_node=8, accumulate="owner")  # all in one
    assert engine.choices.nodes == 1
    engine.detach()


def spread(check: Callable[[], None], ranks_per_node: int) -> Callable[[], None]:
    """``check`` with every engine spread over nodes, in the one mode there."""
    attach = primus_odc.attach

    def attach_on_nodes(model: Any, **options: Any) -> Any:
        options.pop("accumulate", None)
        return attach(model, ranks_per_node=ranks_per_node, **options)

    def checked() -> None:
        with mock.patch.object(primus_odc, "attach", attach_on_nodes):
            check()

    return checked


OWN = {
    f.__name__: f
    for f in (
        gradients_in_all_modes,
        gradients_on_all_meshes,
        gradients_on_nodes_of_three_and_one,
        only_settle_and_publish_move_anything_across,
        two_runs_agree_bit_for_bit,
        what_cannot_be_served_is_refused,
    )
}


IN_A_LOOP = (
    "evaluation_with_any_count_per_rank",
    "clipping_equals_torch",
    "edited_parameters_are_published",
    "detached_model_trains_natively_and_can_be_attached_again",
    "detaching_settles_first",
    "no_collective_in_a_step",
    "memory_is_what_the_formula_says",
    "a_dropped_engine_is_freed",
)
"""The checks in which other nodes take part."""
CHECKS: dict[int, dict[str, Callable[[], None]]] = {
    2: {name: spread(ON_TWO[name], 1) for name in IN_A_LOOP},
    3: {"gradients_in_all_modes": gradients_in_all_modes},
    4: {**OWN, **{name: spread(check, 2) for name, check in ON_FOUR.items()}},
}
"""By number of ranks: nodes of one, 2 + 1, nodes of two."""


def _on_nodes(rank: int, world_size: int) -> dict[str, str]:
    return run_checks(rank, world_size, CHECKS[world_size])


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, str]]]:
    return {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "name"), [(ranks, name) for ranks, checks in CHECKS.items() for name in checks])
def test_across_nodes(outcomes: dict[int, list[dict[str, str]]], world_size: int, name: str) -> None:
    if world_size not in outcomes:
        outcomes[world_size] = run_workers(_on_nodes, world_size, timeout_s=100)
    assert failures(outcomes[world_size], name) == ""
