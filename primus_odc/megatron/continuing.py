"""What keeps a run from continuing a checkpoint, as far as it can be known before the process group exists and data are read.

That the data are the same is known when they are read (``MinibatchStream.load_state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from primus_odc._problems import Problems
from primus_odc.data.stream import require_position
from primus_odc.errors import DataError
from primus_odc.megatron.checkpoint import checkpoint_folder, continue_schedule, read_state, require_same_model
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.model import alone_unless_initialised, build_gpt_without_weights
from primus_odc.megatron.run_options import vocabulary_rows
from primus_odc.megatron.train_config import TrainConfig


def find_what_keeps_from_continuing(
    problems: Problems, params: Mapping[str, Any], train: TrainConfig, step: int, *, thorough: bool
) -> None:
    """Add what is wrong with the checkpoint of ``step`` in ``train.load``, or does not go with the experiment's keys.

    Args:
        problems: gets them.
        params: keys of the trainer module.
        train: those of the loop.
        step: of the checkpoint.
        thorough: build the model, on the meta device, and compare it with the saved one; takes a process group where there is none.
    """
    assert train.load is not None
    load, source = train.load, checkpoint_folder(train.load, step)
    state = problems.of(lambda: read_state(load, step))
    if state is None:
        return
    problems.of(lambda: require_files(source))
    problems.of(lambda: _require_position(source, state, train))
    problems.of(lambda: _require_schedule(source, state, params))
    if thorough:
        problems.of(lambda: _require_model(source, state, params, train))


def require_checkpoint(train: TrainConfig, step: int | None) -> None:
    """An empty ``load`` means a run that is to begin, which only makes sense where it also saves.

    Raises:
        DataError: ``load`` holds no checkpoint (``step`` is None) and is not ``save``.
    """
    load = train.load
    if load is None or step is not None or load == train.save:
        return
    if load.name.startswith("iter_") and (load / ".metadata").exists():
        number = load.name.removeprefix("iter_").lstrip("0") or "0"
        raise DataError(f"load: {load} is one checkpoint; load names the folder it lies in: set load: {load.parent}, ckpt_step: {number}")
    there = "holds no checkpoint" if load.is_dir() else "is not there"
    raise DataError(f"load: {load} {there}; a run that begins there and is continued later has save on the same folder")


def require_files(source: Path) -> None:
    """That the tensors of a checkpoint are there.

    Raises:
        DataError: files are missing, or what lists them cannot be read.
    """
    try:
        listed = FileSystemReader(source).read_metadata().storage_data
    except Exception as error:  # unpickled: damaged bytes raise anything
        raise DataError(
            f"{source}: .metadata cannot be read ({type(error).__name__}: {error}); set ckpt_step to another checkpoint"
        ) from error
    names = sorted({str(place.relative_path) for place in listed.values()})
    if missing := [name for name in names if not (source / name).is_file()]:
        raise DataError(f"{source} is not whole: {', '.join(missing)} of {len(names)} files missing; set ckpt_step to another checkpoint")


def _require_position(source: Path, state: Mapping[str, Any], train: TrainConfig) -> None:
    try:
        require_position(state["stream"], global_batch_size=train.global_batch_size, seed=train.seed)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def _require_schedule(source: Path, state: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), device="cpu"))], lr=1.0)
    continue_schedule(source, state, build_scheduler(optimizer, params))


def _require_model(source: Path, state: Mapping[str, Any], params: Mapping[str, Any], train: TrainConfig) -> None:
    with alone_unless_initialised():
        model = build_gpt_without_weights(params, vocabulary_rows(params, train))
    require_same_model(source, state["parameters"], {name: list(p.shape) for name, p in model.named_parameters()})
