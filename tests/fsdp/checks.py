"""Run many independent checks inside one set of processes, and report each as a test of its own."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Check = Callable[[], None]


def run_checks(rank: int, world_size: int, checks: dict[str, Check]) -> dict[str, str]:
    """``{name: "" or traceback}`` of every check, each called on all ranks; a check asserts and returns nothing."""
    outcome = {}
    for name, check in checks.items():
        dist.barrier()
        try:
            check()
            outcome[name] = ""
        except Exception:  # noqa: BLE001  # reported by the test of this name
            outcome[name] = traceback.format_exc()
        gc.collect()
    return outcome


def failures(outcomes: list[dict[str, str]], name: str) -> str:
    """What went wrong with ``name`` on any rank."""
    return "\n".join(f"--- rank {r} ---\n{o[name]}" for r, o in enumerate(outcomes) if o[name])


def relative_error(value: Any, reference: Any) -> float:
    """Relative L2 difference of two tensors, in fp64."""
    difference = (value.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))
