"""The learning-rate and weight-decay schedule of Megatron, by Megatron's own scheduler, counted in optimizer steps.

Megatron counts samples (iterations times global batch size); the fractions are the same. As there, the step after `n` completed steps uses
the rate at `n`: with a warm-up from 0 the very first step has rate 0. A skipped minibatch does not advance the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from primus_odc.errors import ConfigError

_DECAY_STYLES = ("linear", "cosine", "constant", "inverse-square-root", "WSD")
_WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
_WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


def build_scheduler(optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> OptimizerParamScheduler:
    """Make a scheduler that has already set every parameter group's `lr` and `weight_decay` for the first step.

    Call `.step(1)` after each optimizer step; `.state_dict()` and `.load_state_dict()` (on a fresh scheduler) continue a run. Where saved
    and present settings differ, Megatron's `override_opt_param_scheduler` takes the present ones, `use_checkpoint_opt_param_scheduler`
    the saved ones; with neither, loading raises AssertionError and names the setting. A group's `wd_mult`, `max_lr` and `min_lr` entries,
    where present, count as in Megatron.

    Raises:
        ConfigError: missing or contradictory keys.
    """
    get = params.get
    steps, warmup_fraction = int(get("train_iters") or 0), get("lr_warmup_fraction")
    decay_steps = int(get("lr_decay_iters") or steps)
    warmup_steps = get("lr_warmup_iters", 0) if warmup_fraction is None else warmup_fraction * decay_steps
    style, wsd_steps, wsd_style = get("lr_decay_style", "linear"), get("lr_wsd_decay_iters"), get("lr_wsd_decay_style", "exponential")
    max_lr, min_lr, init_lr = get("lr", -1.0), get("min_lr", 0.0), get("lr_warmup_init", 0.0)
    weight_decay, wd_style = get("weight_decay", 0.01), get("weight_decay_incr_style", "constant")
    start_wd, end_wd = (
        (weight_decay, weight_decay) if wd_style == "constant" else (get("start_weight_decay", -1.0), get("end_weight_decay", -1.0))
    )

    override, use_checkpoint = get("override_opt_param_scheduler", False), get("use_checkpoint_opt_param_scheduler", False)
    numbers = {"lr": max_lr, "min_lr": min_lr, "lr_warmup_init": init_lr, "weight_decay (start)": start_wd, "weight_decay (end)": end_wd}
    problems = [
        f"{key} is missing, negative or no number" for key, value in numbers.items() if not isinstance(value, (int, float)) or value < 0
    ]
    for key, value, allowed in (
        ("lr_decay_style", style, _DECAY_STYLES),
        ("weight_decay_incr_style", wd_style, _WEIGHT_DECAY_STYLES),
        ("lr_wsd_decay_style", wsd_style, _WSD_STYLES),
    ):
        if value not in allowed:
            problems.append(f"{key}: {value!r} is not one of {', '.join(allowed)}")
    if steps < 1:
        problems.append("train_iters must be at least 1")
    elif warmup_steps >= decay_steps:
        problems.append(f"the warm-up of {warmup_steps} steps must be shorter than lr_decay_iters (train_iters if absent), {decay_steps}")
    if override and use_checkpoint:
        problems.append("override_opt_param_scheduler and use_checkpoint_opt_param_scheduler exclude each other")
    if style == "WSD" and wsd_steps is None:
        problems.append("lr_decay_style: WSD needs lr_wsd_decay_iters")
    if not problems and not max(min_lr, init_lr) <= max_lr:
        problems.append(f"min_lr ({min_lr}) and lr_warmup_init ({init_lr}) must be at most lr ({max_lr})")
    if not problems and start_wd > end_wd:
        problems.append(f"start_weight_decay ({start_wd}) must be at most end_weight_decay ({end_wd})")
    if problems:
        raise ConfigError(problems)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=init_lr,
        max_lr=max_lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=steps,
        wd_incr_style=wd_style,
        use_checkpoint_opt_param_scheduler=use_checkpoint,
        override_opt_param_scheduler=override,
        wsd_decay_steps=wsd_steps,
        lr_wsd_decay_style=wsd_style,
    )
