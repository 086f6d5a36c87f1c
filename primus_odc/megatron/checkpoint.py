"""Checkpoints that continue a run exactly, also with another number of ranks.

A checkpoint is a folder ``iter_0000003`` below ``save`` with ``torch.distributed.checkpoint`` files (weights, AdamW's moments, random
numbers; each rank its shards) and ``trainer.json`` (everything else: schedule, position in the data, what it was trained with). It is
written under another name and renamed when it is complete, after which ``latest_checkpointed_iteration.txt`` names it, so a run that dies
while saving leaves the checkpoint before it. Neither the data nor the samples of a minibatch depend on the number of ranks, and the
sharded files are read into any sharding.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from primus_odc.data.stream import MinibatchStream
from primus_odc.errors import ConfigError, DataError
from primus_odc.megatron.arm import Arm

FORMAT = 1
LATEST = "latest_checkpointed_iteration.txt"
_STATE = "trainer.json"
_STATE_KEYS: dict[str, type] = {"step": int, "trained_steps": int, "arm": str, "scheduler": dict, "stream": dict, "parameters": dict}
"""What continuing a run reads of ``trainer.json``."""
_NAMED = 4


def save_checkpoint(folder: Path, step: int, arm: Arm, stream: MinibatchStream) -> Path:
    """Write the checkpoint after ``step`` steps; every rank calls it, between two steps.

    Returns:
        The checkpoint's own folder.
    """
    arm.reshard()
    final = checkpoint_folder(folder, step)
    partial = final.with_name(f"{final.name}.partial")

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete() -> None:
        state = {
            "format": FORMAT,
            "step": step,
            "trained_steps": arm.trained_steps,
            "arm": arm.name,
            "world_size": arm.world_size,
            "scheduler": arm.scheduler.state_dict(),
            "stream": stream.state_dict(),
            "parameters": _shapes(arm),
        }
        (partial / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        latest = folder / f"{LATEST}.partial"
        latest.write_text(f"{step}\n", encoding="utf-8")
        os.replace(latest, folder / LATEST)

    _on_rank_0(arm, prepare)
    try:
        dcp.save(_tensors(arm, arm.trained_steps > 0), checkpoint_id=partial)
    except CheckpointException as error:
        raise DataError(_not_written(_first_failure(error))) from error
    _on_rank_0(arm, complete)
    return final


def latest_step(folder: Path) -> int | None:
    """Step of the latest complete checkpoint of ``folder``; None where there is none.

    Raises:
        DataError: the folder cannot be read, or the file that names it is damaged.
    """
    try:
        text = (folder / LATEST).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{folder / LATEST} cannot be read: {error.strerror}; save and load name a folder of checkpoints") from error
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise DataError(f"{folder / LATEST} holds {text!r} where the number of a step is expected; set ckpt_step to choose a checkpoint")
    return int(text)


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """Everything but tensors of the checkpoint of ``step``.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    source = checkpoint_folder(folder, step)
    try:
        state: dict[str, Any] = json.loads((source / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if source.is_dir():
            raise DataError(
                f"{source} holds no {_STATE}, so it is no checkpoint of primus-odc train; one that Primus or Megatron wrote cannot be "
                "continued here"
            ) from None
        raise DataError(f"{source}: no such checkpoint; set load to the folder it lies in and ckpt_step to its number") from None
    except OSError as error:
        raise DataError(f"{source / _STATE} cannot be read: {error.strerror}; set load to a folder of checkpoints") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source / _STATE} is damaged: {error}") from None
    if not isinstance(state, dict):
        raise DataError(f"{source / _STATE} is damaged: it holds no JSON object")
    if state.get("format") != FORMAT:
        raise DataError(f"{source}: format {state.get('format')}, this release reads format {FORMAT}")
    if wrong := [key for key, kind in _STATE_KEYS.items() if type(state.get(key)) is not kind]:
        raise DataError(f"{source / _STATE} is damaged: {', '.join(wrong)} missing or of another kind; set ckpt_step to another checkpoint")
    return state


def load_checkpoint(folder: Path, step: int, arm: Arm, stream: MinibatchStream) -> None:
    """Continue from the checkpoint of ``step``; every rank calls it before the first training step.

    Raises:
        DataError: there is none, or it belongs to another model or other data.
        ConfigError: it was trained with another schedule.
    """
    source = checkpoint_folder(folder, step)
    state = read_state(folder, step)
    require_same_model(source, state["parameters"], _shapes(arm))
    stream.load_state_dict(state["stream"])
    arm.reshard()
    tensors = _tensors(arm, state["trained_steps"] > 0)
    try:
        dcp.load(tensors, checkpoint_id=source)
    except CheckpointException as error:
        raise DataError(f"{source} cannot be read: {_first_failure(error)}; set ckpt_step to another checkpoint") from error
    torch.set_rng_state(tensors["rng"])
    continue_schedule(source, state, arm.scheduler)
    arm.trained_steps = state["trained_steps"]
    arm.publish()


def continue_schedule(source: Path, state: Mapping[str, Any], scheduler: OptimizerParamScheduler) -> None:
    """Set ``scheduler`` where the one of the checkpoint ``source`` stood.

    Raises:
        ConfigError: it was trained with another schedule.
        DataError: its schedule is damaged.
    """
    try:
        scheduler.load_state_dict(state["scheduler"])
    except AssertionError as error:
        raise ConfigError(
            [
                f"{source} was trained with another schedule: {error}; keep the keys of lr and weight_decay as they were (without "
                "lr_decay_iters a schedule ends with train_iters, so more steps are another schedule), or set "
                "override_opt_param_scheduler: true (take the present ones) or use_checkpoint_opt_param_scheduler: true (take the saved)"
            ]
        ) from error
    except KeyError as error:
        raise DataError(f"{source / _STATE} is damaged: its scheduler lacks {error}; set ckpt_step to another checkpoint") from error


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Of the checkpoint of ``step`` below ``save``."""
    return folder / f"iter_{step:07d}"


def _tensors(arm: Arm, with_optimizer: bool) -> dict[str, Any]:
    """What torch writes and, in place, reads. AdamW's state is made where it does not exist yet."""
    named = [(name, p) for name, p in arm.model.named_parameters()]
    result: dict[str, Any] = {"model": {name: p.detach() for name, p in named}, "rng": torch.get_rng_state()}
    if with_optimizer:
        for _, p in named:
            if p.requires_grad:
                arm.optimizer.make_state(p)
        result["optimizer"] = {name: dict(arm.optimizer.state[p]) for name, p in named if p.requires_grad}
    return result


def _shapes(arm: Arm) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in arm.model.named_parameters()}


def require_same_model(source: Path, saved: dict[str, list[int]], present: dict[str, list[int]]) -> None:
    """Refuse the checkpoint ``source`` of parameters with other names or shapes, each ``{name: shape of the whole}``.

    Raises:
        DataError: they differ.
    """
    names = sorted(set(saved) | set(present))
    differing = [
        f"{name}: {saved.get(name, 'absent')} there, {present.get(name, 'absent')} here"
        for name in names
        if saved.get(name) != present.get(name)
    ]
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise DataError(f"{source} holds another model: {'; '.join(differing[:_NAMED])}{more}; keep the model keys as they were")


def _on_rank_0(arm: Arm, action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the others wait; its failure is everybody's."""
    failure: list[str | None] = [None]
    if arm.rank == 0:
        try:
            action()
        except OSError as error:
            failure[0] = str(error)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise DataError(_not_written(failure[0]))


def _not_written(reason: str) -> str:
    return f"the checkpoint cannot be written: {reason}; the one before it is still whole"


def _first_failure(error: CheckpointException) -> str:
    """What went wrong on the first of the ranks that torch names, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"
