"""The keys of the training loop, out of a trainer module.

Model, schedule, data and communication keys are checked by the parts they belong to; which keys there are at all stands in
:mod:`primus_odc.megatron.train_keys`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primus_odc._config_values import BadValueError, describe, expand_home, spell
from primus_odc.errors import ConfigError
from primus_odc.megatron.train_keys import FIXED, TEXT_KEYS

_FLAGS = ("bf16", "grad_reduce_in_bf16", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")

_LARGEST = sys.float_info.max
_SMALLEST_FP32 = 2.0**-126
"""The smallest normal number."""
_SEEDS = 2**32
"""What numpy takes, which Megatron seeds too."""
_TIMEOUT_MINUTES = 10000
"""About a week. Waits of sockets are limited to 2**31 ms, 24 days."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """The keys of the training loop. Names and defaults are Megatron's, except that nothing is evaluated without an ``eval_interval``."""

    train_iters: int
    """Minibatches to train on, from the beginning of the run, skipped ones included."""
    global_batch_size: int
    """Samples of one minibatch over all ranks."""
    seed: int
    """Of the initial weights and the order of the data."""
    eval_interval: int | None
    """Evaluate after every so many steps; null or 0: never."""
    eval_iters: int
    """Minibatches of one evaluation, each of ``global_batch_size`` validation samples; 0: evaluation is off, as in Megatron."""
    save: Path | None
    """Folder of the checkpoints; null: none are written."""
    load: Path | None
    """Folder whose latest checkpoint is continued; one without any starts a run."""
    save_interval: int | None
    """Save after every so many steps; null or 0: only after the last step, which is always saved."""
    ckpt_step: int | None
    """Load the checkpoint of this step instead of the latest."""
    exit_interval: int | None
    """Stop after the first step that is a multiple of it, null or 0: only at the end; with ``save``, a checkpoint is written."""
    log_interval: int
    """Print a line for every so many steps; the step log always has all."""
    distributed_backend: Literal["gloo", "nccl"]
    """``gloo`` trains on the CPU, ``nccl`` (Megatron's default) on GPUs, with RCCL on AMD."""
    distributed_timeout_minutes: float
    """Longest wait in a collective."""
    make_vocab_size_divisible_by: int
    """The vocabulary is padded to a multiple of it, as Megatron does."""

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return self.eval_interval is not None and self.eval_iters > 0

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of embedding and head for a tokenizer of ``vocab_size`` tokens."""
        return -(-vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by


def _switch(value: Any) -> Any:
    """A block that is switched off (Primus' ``lora: {enabled: false, ...}``) is as good as false."""
    return False if isinstance(value, Mapping) and "enabled" in value and not value["enabled"] else value


def parse_train(params: Mapping[str, Any]) -> TrainConfig:
    """Read and check the keys of the loop, out of :func:`normalise`'s result.

    Raises:
        ConfigError: every wrong key and value at once.
    """
    problems = [
        f"{key}: {describe(params[key])} is not supported by the standalone trainer; leave it out or set {spell(accepted[0])}: {reason}"
        for key, (accepted, reason) in FIXED.items()
        if key in params and _switch(params[key]) not in accepted
    ]

    def number(key: str, default: Any, *, least: float = 1, below: float = math.inf, whole: bool = True) -> Any:
        value = params.get(key, default)
        if value is None and default is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and least <= value < below
        if value is None or not good or (whole and value != int(value)):
            given = "is missing" if key not in params else f"is {describe(value)}"
            bound = f" and below {below}" if below < math.inf else ""
            problems.append(f"{key} {given}; it must be a {'whole ' if whole else ''}number of at least {least:g}{bound}")
            return least
        return int(value) if whole else float(value)

    def interval(key: str) -> int | None:
        return number(key, None, least=0) or None

    def folder(key: str) -> Path | None:
        value = params.get(key)
        if value is None:
            return None
        if not (isinstance(value, str) and value) or "\0" in value:
            problems.append(f"{key} is {describe(value)}; it must be the path of a folder, or null")
            return None
        try:
            path = expand_home(value)
        except BadValueError as error:
            problems.append(f"{key} {error}")
            return None
        if path.exists() and not path.is_dir():
            problems.append(f"{key} is {describe(value)}, which is a file; it must be the path of a folder, or null")
        return path

    backend = params.get("distributed_backend", "nccl")
    if backend not in ("gloo", "nccl"):
        problems.append(f"distributed_backend is {describe(backend)}; allowed: gloo (trains on the CPU), nccl (trains on GPUs)")
    for key in ("adam_beta1", "adam_beta2"):
        number(key, 0.0, least=0, below=1, whole=False)
    number("clip_grad", 0.0, least=0, whole=False)
    # A divisor: what fp32 rounds to 0 makes weights NaN where a gradient is 0.
    number("adam_eps", 1e-8, least=_SMALLEST_FP32, whole=False)
    flags = {key: params.get(key, False) for key in _FLAGS}
    problems += [f"{key} is {describe(value)}; it must be true or false" for key, value in flags.items() if not isinstance(value, bool)]
    config = TrainConfig(
        train_iters=number("train_iters", -1),
        global_batch_size=number("global_batch_size", -1),
        seed=number("seed", 1234, least=0, below=_SEEDS),
        eval_interval=interval("eval_interval"),
        eval_iters=number("eval_iters", 100, least=0),
        save=folder("save"),
        load=folder("load"),
        save_interval=interval("save_interval"),
        ckpt_step=number("ckpt_step", None, least=0),
        exit_interval=interval("exit_interval"),
        log_interval=number("log_interval", 100),
        distributed_backend=backend,
        distributed_timeout_minutes=number("distributed_timeout_minutes", 10, least=0.01, below=_TIMEOUT_MINUTES, whole=False),
        make_vocab_size_divisible_by=number("make_vocab_size_divisible_by", 128),
    )
    if config.ckpt_step is not None and config.load is None:
        problems.append("ckpt_step chooses a checkpoint of load, which is not set")
    if config.evaluates and not params.get("sft_validation_fraction"):
        problems.append("eval_interval needs validation samples: set sft_validation_fraction above 0, or eval_iters: 0 for no evaluation")
    if problems:
        raise ConfigError(problems)
    return config


def normalise(params: Mapping[str, Any]) -> dict[str, Any]:
    """``params`` with text that spells a number turned into one (YAML reads ``1e-4`` as text), except where a text is meant.

    Numbers that are not finite, and whole ones beyond all that are, become or stay text, which no key of a number accepts.
    """
    return {key: value if key in TEXT_KEYS else _number(value) for key, value in params.items()}


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return str(value) if isinstance(value, float) else "a whole number that no float can hold"
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else number
