"""What a step log says of its run, in what two runs differ, and whose log a run may continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from primus_odc.report import schema
from primus_odc.report.result import FORMAT

MAX_NAMED = 6
# Keys that a killed run may be started again with: they change no step.
_CHANGE_NO_STEP = ("save_interval", "log_interval", "exit_interval", "distributed_timeout_minutes")


@dataclass(kw_only=True, slots=True, frozen=True)
class LogHeader:
    """What a run trained: the first line of its log."""

    arm: str
    """Reporting name, as in ``ArmResult.arm``."""
    world_size: int
    """Number of ranks."""
    seed: int
    """Of model and data order."""
    global_batch_size: int
    """Samples per minibatch over all ranks."""
    data: dict[str, object]
    """What identifies the data: source, tokenizer, cache digest, number of samples; equal exactly when the token sequences are."""
    config: dict[str, object] = field(default_factory=dict)
    """The experiment's flat parameters."""
    machine: dict[str, object] = field(default_factory=dict)
    """See :func:`primus_odc.report.machine.describe_machine`."""
    versions: dict[str, str] = field(default_factory=dict)
    """See :func:`primus_odc.report.machine.describe_versions`."""
    first_step: int = 0
    """Step of the first record; above 0 where the run goes on from a checkpoint that another folder's run wrote."""
    format: int = FORMAT
    """Version of this schema."""


def foreign(header: LogHeader, end: int, arm: str, config: dict[str, object], first_step: int) -> list[str]:
    """Why a log is not one that a run in ``arm`` with ``config`` continues.

    Args:
        header: of the log.
        end: the step after its last one.
        arm: of the run.
        config: of the run.
        first_step: at which the run goes on; 0: ``load`` holds no checkpoint, so that it begins.
    """
    problems = [] if header.arm == arm else [f"arm: {header.arm} in the log, {arm} in this run"]
    old, new = header.config, schema.encode(config)
    if first_step and new.get("load") is not None and _same_folder(old.get("save"), new["load"]):
        return problems
    # Where there was nothing to load, a killed run may have been started without it.
    kept_out = (*_CHANGE_NO_STEP, *(() if first_step else ("load",)), *(("comm_backend", "odc") if problems else ()))
    old, new = ({key: value for key, value in params.items() if key not in kept_out} for params in (old, new))
    if different := differences(old, new, "the log", "this run"):
        more = f" and {len(different) - MAX_NAMED} more" if len(different) > MAX_NAMED else ""
        reason = "its run saved no checkpoint in load" if first_step else "load holds no checkpoint"
        problems.append(f"{reason}, and it is another run's: {', '.join(different[:MAX_NAMED])}{more}")
    elif end == new.get("train_iters"):
        problems.append(f"it is the log of a run that has ended, with step {end - 1}")
    return problems


def _same_folder(a: object, b: object) -> bool:
    return isinstance(a, str) and isinstance(b, str) and Path(a).expanduser().resolve() == Path(b).expanduser().resolve()


def header_problems(a: LogHeader, b: LogHeader, name_a: str, name_b: str) -> list[str]:
    """Differences that make two runs see different minibatches, or spread them over different numbers of ranks."""
    keys: dict[str, Callable[[LogHeader], object]] = {
        "seed": lambda header: header.seed,
        "global batch size": lambda header: header.global_batch_size,
        "number of ranks": lambda header: header.world_size,
    }
    problems = [f"{key}: {get(a)} in {name_a}, {get(b)} in {name_b}" for key, get in keys.items() if get(a) != get(b)]
    return problems + [f"other data: {item}" for item in differences(a.data, b.data, name_a, name_b)]


def differences(a: dict[str, object], b: dict[str, object], name_a: str, name_b: str) -> list[str]:
    absent = object()
    pairs = ((key, a.get(key, absent), b.get(key, absent)) for key in sorted(set(a) | set(b)))
    return [f"{key} is {_show(x, absent)} in {name_a}, {_show(y, absent)} in {name_b}" for key, x, y in pairs if x != y]


def _show(value: object, absent: object) -> str:
    return "not set" if value is absent else json.dumps(value)
