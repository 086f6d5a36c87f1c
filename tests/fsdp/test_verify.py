"""``verify: reference`` tells a wrong sum from a right one, also where the model's own gradients are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_odc.errors import VerificationError
from primus_odc.fsdp.verify import ReferenceCheck
from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.spec import GroupSpec, ParamSpec
from tests.workers import run_workers

INF, NAN = float("inf"), float("nan")
WEIGHT = ParamSpec("weight", True, torch.float32, 4, (4,), 0, 0)
GROUP = GroupSpec("group", (WEIGHT,), 2, 16, 4, torch.float32, torch.float32)
CASES: dict[str, tuple[list[float], list[float], bool]] = {
    "equal": ([1, 2, 3, 4], [1, 2, 3, 4], True),
    "rounding": ([1, 2, 3, 4], [1, 2, 3, 4 + 2e-6], True),
    "another": ([1, 2, 3, 4], [1, 2, 3, 4.1], False),
    "infinite": ([1, INF, -INF, 4], [1, INF, -INF, 4], True),
    "not a number": ([1, NAN, 3, 4], [1, NAN, 3, 4], True),
    "nothing finite": ([INF, NAN, -INF, NAN], [INF, NAN, -INF, NAN], True),
    "another beside what is not finite": ([1, INF, NAN, 4], [1, INF, NAN, 4.1], False),
    "another sign": ([1, INF, 3, 4], [1, -INF, 3, 4], False),
    "finite instead": ([1, INF, 3, 4], [1, 2, 3, 4], False),
    "infinite instead": ([1, 2, 3, 4], [1, INF, 3, 4], False),
    "a number instead": ([1, NAN, 3, 4], [1, 2, 3, 4], False),
    "not a number instead": ([1, 2, 3, 4], [1, NAN, 3, 4], False),
}


def accepted(rank: int, world_size: int) -> dict[str, bool]:
    """Every rank holds half of each gradient; rank r is given what was settled for it on demand."""
    mesh: Any = SimpleNamespace(
        names=["rank 0", "rank 1"], rank=rank, shard_index=rank, shard_group=dist.group.WORLD, replicate_group=None, peers=(0, 1)
    )
    check = ReferenceCheck(mesh, [GROUP], torch.device("cpu"))
    found = {}
    for epoch, (name, (gradients, settled, _)) in enumerate(CASES.items()):
        check.add(0, Contribution(torch.tensor([gradients, gradients]) / 2, (0,)))
        try:
            check.gradients(0, torch.tensor(settled), epoch)
            found[name] = True
        except VerificationError:
            found[name] = False
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, bool]]:
    return run_workers(accepted, 2)


@pytest.mark.parametrize("name", CASES)
def test_gradients(outcomes: list[dict[str, bool]], name: str) -> None:
    assert [found[name] for found in outcomes] == [CASES[name][2]] * 2
