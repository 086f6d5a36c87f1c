"""The keys of a Primus experiment YAML that choose data and tokenizer.

Names are Primus' own where it has one; the values listed here are what this package reads. All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from primus_odc._config_values import BadValueError, expand_home, likely
from primus_odc.data.stdlib import Unit
from primus_odc.data.template import Template
from primus_odc.errors import ConfigError

TokenizerType = Literal["byte", "rwkv", "HuggingFaceTokenizer"]

# openai and chatml are Primus' other names for conversations with these markers.
_FORMATS: dict[str, Template] = {"messages": "messages", "openai": "messages", "chatml": "messages", "plain": "plain", "text": "text"}
_TOKENIZERS: dict[str, TokenizerType] = {name: name for name in get_args(TokenizerType)}
_UNITS: dict[str, Unit] = {name: name for name in get_args(Unit)}
_PRIMUS_SFT_KEYS = ("sft_bridge_compat_inline_bos", "sft_sanitize_nan_grads")


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """Data and tokenizer of an experiment."""

    sft_dataset_name: str
    """``stdlib`` (the sources of Python's standard library), a path of a ``.jsonl`` or ``.parquet`` file, a dataset folder, or a name
    ``owner/dataset`` of the Hugging Face hub."""
    sft_conversation_format: Template
    """``messages`` (also ``openai``, ``chatml``), ``plain`` or ``text``, see :mod:`primus_odc.data.template`; ``text`` for stdlib and
    ``messages`` for everything else by default."""
    sft_dataset_split: str
    """Split of a dataset folder or hub dataset to read; ``train`` by default. Both our training and validation part come out of it."""
    sft_stdlib_unit: Unit
    """What one sample of ``stdlib`` is: ``definition`` (default) or ``file``."""
    sft_max_samples: int | None
    """Read only the first so many records of the source; all by default."""
    sft_min_tokens: int
    """Samples of fewer tokens are left out; 0 by default, which keeps all. How many were left out is reported."""
    sft_validation_fraction: float
    """Part of the samples, 0 to below 1, kept for validation, chosen by a hash of their ids; 0 by default."""
    tokenizer_type: TokenizerType
    """``byte``, ``rwkv`` or ``HuggingFaceTokenizer``."""
    tokenizer_model: str | None
    """For ``HuggingFaceTokenizer``: a ``tokenizer.json``, or a local folder that holds one."""
    tokenizer_eos_token: str | None
    """For ``HuggingFaceTokenizer``: spelling of the token that ends a document, where no ``tokenizer_config.json`` says it."""
    data_cache_path: Path | None
    """Folder of the token caches; below the experiment's workspace by default."""


DATA_KEYS: tuple[str, ...] = tuple(field.name for field in fields(DataConfig))
_OWN_SFT_KEYS = tuple(key for key in DATA_KEYS if key.startswith("sft_"))


def parse_data(params: Mapping[str, Any]) -> DataConfig:
    """Read and check the keys of a trainer module.

    Raises:
        ConfigError: all problems at once, each with the key, the value, what is allowed and the nearest name.
    """
    problems: list[str] = [
        f"{key} is no key of the data; {_did_you_mean(key, _OWN_SFT_KEYS)}"
        for key in params
        if str(key).startswith("sft_") and key not in (*_OWN_SFT_KEYS, *_PRIMUS_SFT_KEYS)
    ]
    name = _path(params, "sft_dataset_name", problems)
    if name is None:
        problems.append("sft_dataset_name is missing; give stdlib, a path, or a name of the hub")
    default_format = "text" if name == "stdlib" else "messages"
    template = _choice(params, "sft_conversation_format", _FORMATS, default_format, problems)
    unit = _choice(params, "sft_stdlib_unit", _UNITS, "definition", problems)
    tokenizer = _choice(params, "tokenizer_type", _TOKENIZERS, None, problems)
    model = _path(params, "tokenizer_model", problems)
    if tokenizer == "HuggingFaceTokenizer" and model is None:
        problems.append("tokenizer_model is missing; tokenizer_type HuggingFaceTokenizer needs a tokenizer.json or a local folder with one")
    limit = params.get("sft_max_samples")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        problems.append(f"sft_max_samples is {limit!r}; it must be a whole number of at least 1, or absent")
    shortest = params.get("sft_min_tokens", 0)
    if not isinstance(shortest, int) or isinstance(shortest, bool) or shortest < 0:
        problems.append(f"sft_min_tokens is {shortest!r}; it must be a whole number of at least 0")
    fraction = params.get("sft_validation_fraction", 0.0)
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 <= fraction < 1:
        problems.append(f"sft_validation_fraction is {fraction!r}; it must be a number from 0 to below 1")
    split = _text(params, "sft_dataset_split", problems)
    cache = _path(params, "data_cache_path", problems)
    eos_token = _text(params, "tokenizer_eos_token", problems)
    if problems:
        raise ConfigError(problems)
    return DataConfig(
        sft_dataset_name=cast(str, name),
        sft_conversation_format=cast(Template, template),
        sft_dataset_split=split or "train",
        sft_stdlib_unit=cast(Unit, unit),
        sft_max_samples=limit,
        sft_min_tokens=shortest,
        sft_validation_fraction=float(fraction),
        tokenizer_type=cast(TokenizerType, tokenizer),
        tokenizer_model=model,
        tokenizer_eos_token=eos_token,
        data_cache_path=Path(cache).expanduser() if cache else None,
    )


def _did_you_mean(value: str, allowed: Sequence[str]) -> str:
    near = likely(value, allowed)
    hint = f"; did you mean {near}?" if near else ""
    return f"allowed: {', '.join(allowed)}{hint}"


def _choice(params: Mapping[str, Any], key: str, allowed: Mapping[str, str], default: str | None, problems: list[str]) -> str | None:
    value = params.get(key)
    if value is None:
        if default is None:
            problems.append(f"{key} is missing; allowed: {', '.join(allowed)}")
            return None
        return allowed[default]
    if not isinstance(value, str) or value not in allowed:
        problems.append(f"{key} is {value!r}; {_did_you_mean(str(value), list(allowed))}")
        return None
    return allowed[value]


def _text(params: Mapping[str, Any], key: str, problems: list[str]) -> str | None:
    value = params.get(key)
    if value is not None and (not (isinstance(value, str) and value) or "\0" in value):
        problems.append(f"{key} is {value!r}; it must be text, not empty and without a NUL character")
        return None
    return value


def _path(params: Mapping[str, Any], key: str, problems: list[str]) -> str | None:
    """Text that is, or may be, the path of a file or folder."""
    value = _text(params, key, problems)
    try:
        expand_home(value or "")
    except BadValueError as error:
        problems.append(f"{key} {error}")
        return None
    return value
