"""The learning-rate and weight-decay schedule of Megatron, by Megatron's own scheduler, counted in optimizer steps.

Megatron counts samples (iterations times global batch size); the fractions are the same. As there, the step after `n` completed steps uses
the rate at `n`: with a warm-up from 0 the very first step has rate 0. A skipped minibatch does not advance the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from primus_odc.megatron.schedule import schedule


def build_scheduler(optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> OptimizerParamScheduler:
    """Make a scheduler that has already set every parameter group's `lr` and `weight_decay` for the first step.

    Call `.step(1)` after each optimizer step; `.state_dict()` and `.load_state_dict()` (on a fresh scheduler) continue a run. Where saved
    and present settings differ, Megatron's `override_opt_param_scheduler` takes the present ones, `use_checkpoint_opt_param_scheduler`
    the saved ones; with neither, loading raises AssertionError and names the setting. A group's `wd_mult`, `max_lr` and `min_lr` entries,
    where present, count as in Megatron.

    Raises:
        ConfigError: missing or contradictory keys.
    """
    return OptimizerParamScheduler(optimizer, **schedule(params))
