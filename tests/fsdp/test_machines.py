"""The whole engine on two machines, 2x2 and 2+1: the checks of :mod:`tests.fsdp.test_nodes` with nothing mapped between nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fsdp.checks import failures, run_checks
from tests.fsdp.machines import engines_on_machines, move_to_machine
from tests.fsdp.models import check_gradients, tiny_model
from tests.fsdp.test_engine import COUNTS
from tests.fsdp.test_loop import ON_FOUR, ON_TWO
from tests.fsdp.test_nodes import (
    gradients_in_all_modes,
    only_settle_and_publish_move_anything_across,
    spread,
    two_runs_agree_bit_for_bit,
)
from tests.symmetric.hosts import two_hosts
from tests.workers import run_workers

CHECKS: dict[int, dict[str, Callable[[], None]]] = {
    2: {
        name: spread(ON_TWO[name], 1)
        for name in (
            "evaluation_with_any_count_per_rank",
            "clipping_equals_torch",
            "detached_model_trains_natively_and_can_be_attached_again",
            "a_dropped_engine_is_freed",
        )
    },
    3: {"gradients_in_all_modes": gradients_in_all_modes},
    4: {
        **{f.__name__: f for f in (gradients_in_all_modes, only_settle_and_publish_move_anything_across, two_runs_agree_bit_for_bit)},
        "strided_groups": spread(ON_FOUR["strided_groups"], 2),
    },
}
"""By number of ranks: machines of one, 2 + 1, machines of two."""
CASES = [(ranks, name) for ranks, checks in CHECKS.items() for name in checks]


def _on_machines(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    engines_on_machines(folder, world_size)
    return run_checks(rank, world_size, CHECKS[world_size])


def _machine_of(hosts: list[str], ranks_per_node: int, rank: int) -> None:
    move_to_machine(rank, hosts, ranks_per_node)


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, str]]]:
    return {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_on_machines(
    outcomes: dict[int, list[dict[str, str]]], tmp_path_factory: pytest.TempPathFactory, world_size: int, name: str
) -> None:
    if world_size not in outcomes:
        with two_hosts() as hosts:
            first = partial(_machine_of, hosts, 1 if world_size == 2 else 2)
            outcomes[world_size] = run_workers(_on_machines, world_size, tmp_path_factory.mktemp("machines"), timeout_s=100, first=first)
    assert failures(outcomes[world_size], name) == ""


def _words_are_shown(rank: int, world_size: int, folder: Path) -> list[float]:
    engines_on_machines(folder, world_size, hides=True)
    modes: list[dict[str, Any]] = [{"parameters": "reshard"}, {"parameters": "resident", "verify": "checksum"}]
    return [check_gradients(tiny_model, COUNTS[4], {"ranks_per_node": 2, **options}) for options in modes]


@pytest.mark.timeout(120)
def test_where_every_rank_shows_its_words_itself(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        for errors in run_workers(_words_are_shown, 4, tmp_path, timeout_s=100, first=partial(_machine_of, hosts, 2)):
            assert max(errors) <= 1e-6
