"""Whose outputs a run may write: nothing of another run is written over, and no two runs write into one folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from primus_odc._locks import FOLDER_LOCK, lock_folder, lock_open_file, no_locks, unwritable
from primus_odc._problems import Problems
from primus_odc.config import ParsedComm
from primus_odc.errors import ConfigError, DataError
from primus_odc.experiment import Experiment
from primus_odc.megatron.checkpoint import latest_step
from primus_odc.megatron.continuing import find_what_keeps_from_continuing, require_checkpoint
from primus_odc.megatron.train_config import TrainConfig
from primus_odc.report.logs import require_no_log, require_own_log


def find_output_problems(
    problems: Problems, experiment: Experiment, params: Mapping[str, Any], comm: ParsedComm | None, train: TrainConfig, *, thorough: bool
) -> None:
    """Add what is wrong with where a run continues from and writes to: a checkpoint that is missing or does not go with the keys, folders
    that cannot be written to, outputs of an earlier run or of a running one.

    Args:
        problems: gets them.
        experiment: says where the step log is.
        params: keys of the trainer module.
        comm: its arm; None where that is not known.
        train: keys of the loop.
        thorough: compare the model of the checkpoint too, see :func:`find_what_keeps_from_continuing`.
    """
    save, load, before = train.save, train.load, len(problems.found)
    step = problems.of(lambda: step_to_load(train))
    if len(problems.found) == before:
        problems.of(lambda: require_checkpoint(train, step))
    if load is not None and step is not None:
        find_what_keeps_from_continuing(problems, params, train, step, thorough=thorough)
    for key, folder in _folders(experiment, params).items():
        problems.found += unwritable(key, folder)
    if load is None:
        problems.of(lambda: require_no_log(experiment.root))
    elif comm is not None and len(problems.found) == before:
        problems.of(lambda: require_own_log(experiment.root, comm.arm, dict(params), step or 0))
    if save is not None and (wrong := unwritable("save", save)):
        problems.found += wrong
    elif save is not None:
        problems.of(lambda: _require_idle(save))
        problems.of(lambda: _require_own(train))


def _folders(experiment: Experiment, params: Mapping[str, Any]) -> dict[str, Path]:
    """Key -> folder that a run writes into, beside ``save``. A folder of token caches that is there may hold what is needed."""
    folders, caches = {"workspace": experiment.root}, params.get("data_cache_path")
    if isinstance(caches, str) and caches and not os.path.exists(os.path.expanduser(caches)):
        folders["data_cache_path"] = Path(os.path.expanduser(caches))
    return folders


def step_to_load(train: TrainConfig) -> int | None:
    """Of the checkpoint that ``load`` and ``ckpt_step`` mean; None where there is none yet.

    Raises:
        DataError: the folder cannot be read.
    """
    if train.load is None:
        return None
    return train.ckpt_step if train.ckpt_step is not None else latest_step(train.load)


@contextmanager
def hold_save(train: TrainConfig) -> Iterator[None]:
    """Keep other runs out of ``save`` while this one lasts; every rank calls it, rank 0 holds the lock.

    A killed run loses its lock with its life and can be continued at once.

    Raises:
        DataError: another run holds the folder, or it cannot be locked; every rank raises.
    """
    save = train.save
    if save is None:
        yield
        return
    failure: list[str | None] = [None]
    file = None
    if dist.get_rank() == 0:
        try:
            file = lock_folder(save, "save", busy=_busy(save))
            # Another run may have saved and ended since the outputs were checked.
            _require_own(train)
        except (ConfigError, DataError) as error:
            failure[0] = str(error)
    try:
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise DataError(failure[0])
        yield
    finally:
        if file is not None:
            file.close()


def _continues_itself(train: TrainConfig) -> bool:
    return train.save is not None and train.load is not None and train.save.resolve() == train.load.resolve()


def _require_own(train: TrainConfig) -> None:
    """That ``save`` holds no checkpoint but those that this run continues."""
    assert train.save is not None
    step = None if _continues_itself(train) else latest_step(train.save)
    if step is not None:
        raise ConfigError(
            [f"save: {train.save} holds the checkpoint of step {step} of a run; continue it (load: {train.save}), or save elsewhere"]
        )


def _require_idle(save: Path) -> None:
    try:
        file = (save / FOLDER_LOCK).open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError([f"save: {save} cannot be read: {error.strerror}; choose another folder"]) from error
    with file:
        lock_open_file(file, str(save), busy=_busy(save), remedy=no_locks("save"), shared=True)


def _busy(save: Path) -> str:
    return f"save: a run that is still going on keeps its checkpoints in {save}; save elsewhere, or wait for its end and continue it (load)"
