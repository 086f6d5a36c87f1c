"""Whose outputs a run may write: nothing of another run is written over, and no two runs write into one folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from primus_odc._locks import FOLDER_LOCK, lock_folder, lock_open_file, no_locks
from primus_odc._problems import Problems
from primus_odc.errors import ConfigError, DataError
from primus_odc.megatron.checkpoint import latest_step, read_state
from primus_odc.megatron.run_options import RunOptions
from primus_odc.megatron.train_config import TrainConfig
from primus_odc.report.logs import require_no_log, require_own_log


def check_outputs(options: RunOptions) -> None:
    """Refuse to write over the outputs of an earlier run or of a running one, and to continue from a missing checkpoint.

    Raises:
        ConfigError: all such problems at once.
    """
    problems, train = Problems(), options.train
    save, load = train.save, train.load
    step = problems.of(lambda: step_to_load(train))
    if load is not None and step is not None:
        problems.of(lambda: read_state(load, step))
    if load is None:
        problems.of(lambda: require_no_log(options.experiment.root))
    elif not problems.found:
        problems.of(lambda: require_own_log(options.experiment.root, options.comm.arm, options.params, step or 0))
    if save is not None:
        problems.of(lambda: _require_idle(save))
        problems.of(lambda: _require_own(train))
    problems.raise_any()


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
