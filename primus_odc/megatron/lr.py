"""The learning-rate and weight-decay schedule of Megatron, by Megatron's own scheduler, counted in optimizer steps.

Megatron counts samples (iterations times global batch size); the fractions are the same. As there, the step after `n` completed steps uses
the rate at `n`: with a warm-up from 0 the very first step has rate 0. A skipped minibatch does not advance the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from primus_odc._config_values import describe
from primus_odc.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # torch; checking the keys needs neither

    return OptimizerParamScheduler(optimizer, **schedule(params))


def schedule(params: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron's scheduler takes beside the optimizer.

    Raises:
        ConfigError: missing or contradictory keys, all at once.
    """
    get = params.get
    problems: list[str] = []
    unusable: set[str] = set()

    def number(key: str, default: float | None, least: float = 0) -> float:
        value = get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            given = "is missing" if value is None else f"is {describe(value)}"
            problems.append(f"{key} {given}; it must be a number of at least {least:g}")
            unusable.add(key)
            return least
        return value

    steps = int(number("train_iters", None, least=1))
    decay_steps = int(number("lr_decay_iters", None, least=1)) if get("lr_decay_iters") is not None else steps
    fraction = get("lr_warmup_fraction") is not None
    warmup_steps = number("lr_warmup_fraction", None) * decay_steps if fraction else number("lr_warmup_iters", 0)
    if fraction and get("lr_warmup_iters"):
        problems.append("lr_warmup_fraction and lr_warmup_iters exclude each other: leave one of them out")
    style, wsd_style = get("lr_decay_style", "linear"), get("lr_wsd_decay_style", "exponential")
    wsd_steps = int(number("lr_wsd_decay_iters", None)) if get("lr_wsd_decay_iters") is not None else None
    max_lr, min_lr, init_lr = number("lr", None), number("min_lr", 0.0), number("lr_warmup_init", 0.0)
    wd_style = get("weight_decay_incr_style", "constant")
    if wd_style == "constant":
        start_wd = end_wd = number("weight_decay", 0.01)
        problems += [
            f"{key} is {describe(get(key))} and needs weight_decay_incr_style: linear or cosine, where it is constant; or set weight_decay"
            for key in ("start_weight_decay", "end_weight_decay")
            if get(key) is not None
        ]
    else:
        start_wd, end_wd = number("start_weight_decay", None), number("end_weight_decay", None)
    override, use_checkpoint = get("override_opt_param_scheduler", False), get("use_checkpoint_opt_param_scheduler", False)
    for key, value, allowed in (
        ("lr_decay_style", style, _DECAY_STYLES),
        ("weight_decay_incr_style", wd_style, _WEIGHT_DECAY_STYLES),
        ("lr_wsd_decay_style", wsd_style, _WSD_STYLES),
    ):
        if value not in allowed:
            problems.append(f"{key}: {value!r} is not one of {', '.join(allowed)}")
    if override and use_checkpoint:
        problems.append("override_opt_param_scheduler and use_checkpoint_opt_param_scheduler exclude each other")
    if style == "WSD" and wsd_steps is None:
        problems.append("lr_decay_style: WSD needs lr_wsd_decay_iters")
    comparisons = (
        (
            ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction"),
            warmup_steps >= decay_steps,
            f"the warm-up of {warmup_steps:g} steps (lr_warmup_iters or lr_warmup_fraction) must be shorter than lr_decay_iters "
            f"(train_iters if absent), {decay_steps}",
        ),
        (
            ("lr", "min_lr", "lr_warmup_init"),
            max(min_lr, init_lr) > max_lr,
            f"min_lr ({min_lr}) and lr_warmup_init ({init_lr}) must be at most lr ({max_lr})",
        ),
        (
            ("weight_decay", "start_weight_decay", "end_weight_decay"),
            start_wd > end_wd,
            f"start_weight_decay ({start_wd}) must be at most end_weight_decay ({end_wd})",
        ),
    )
    problems += [text for keys, wrong, text in comparisons if wrong and unusable.isdisjoint(keys)]
    if problems:
        raise ConfigError(problems)
    return {
        "init_lr": init_lr,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "lr_warmup_steps": warmup_steps,
        "lr_decay_steps": decay_steps,
        "lr_decay_style": style,
        "start_wd": start_wd,
        "end_wd": end_wd,
        # A constant weight decay has no length: a run may be continued with more steps.
        "wd_incr_steps": 1 if wd_style == "constant" else steps,
        "wd_incr_style": wd_style,
        "use_checkpoint_opt_param_scheduler": use_checkpoint,
        "override_opt_param_scheduler": override,
        "wsd_decay_steps": wsd_steps,
        "lr_wsd_decay_style": wsd_style,
    }
