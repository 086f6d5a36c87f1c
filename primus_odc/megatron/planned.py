"""What ``primus-odc plan`` reads of an experiment: the lengths that training would see, and what it would plan them with.

Neither GPUs nor a process group are needed; torch and megatron-core only where ``odc.cost_model: attention`` counts the model's FLOPs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from primus_odc.data.build import build_dataset
from primus_odc.experiment import load_experiment
from primus_odc.megatron.compare_job import arm_params
from primus_odc.megatron.run_options import cap_of, check_all_but_model, cost_model_of, described_layers
from primus_odc.megatron.train_config import normalise
from primus_odc.planning import CostModel
from primus_odc.versions import require_standalone


@dataclass(kw_only=True, slots=True, frozen=True)
class Planned:
    """An experiment as its planner sees it, in whatever arm."""

    lengths: npt.NDArray[np.int64]
    """[samples] tokens of each sample to train on, as ``odc.over_length`` leaves them."""
    max_tokens: int
    """Most tokens of one microbatch."""
    global_batch_size: int
    """Samples of a minibatch, all ranks together."""
    cost_model: CostModel
    """That of ``odc.cost_model`` and ``odc.microbatch_cost``."""


def read_planned(config: Path, overrides: Sequence[str]) -> Planned:
    """Read the experiment ``config`` with the words ``overrides`` that change its keys, and its data, through the token cache.

    Raises:
        ConfigError: all that is wrong with its keys.
        DataError: unusable data, samples over the cap with ``odc.over_length: error``.
        VersionError: torch or megatron-core is needed and is none of the tested ones.
    """
    experiment = load_experiment(config, overrides)
    params = arm_params(normalise(experiment.params), "odc_nopad")
    problems, comm, train = check_all_but_model(experiment, params)
    problems.raise_any()
    assert comm is not None and train is not None
    max_tokens = cap_of(comm, params)
    cost_model = cost_model_of(comm.odc, lambda: described_layers(_describe_model(params)))
    dataset = build_dataset(params, "train", workspace=experiment.workspace, max_tokens=max_tokens, over_length=comm.odc.over_length)
    return Planned(lengths=dataset.lengths, max_tokens=max_tokens, global_batch_size=train.global_batch_size, cost_model=cost_model)


def _describe_model(params: Mapping[str, Any]) -> Any:
    require_standalone()
    return importlib.import_module("primus_odc.megatron.gpt_config").gpt_config(params, vocab_size=1)
