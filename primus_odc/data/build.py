"""From the keys of an experiment to the datasets it trains and evaluates on."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from primus_odc._config_values import likely
from primus_odc._problems import Problems
from primus_odc.data.cache import open_or_build
from primus_odc.data.dataset import TokenDataset
from primus_odc.data.huggingface import folder_source, hub_source, import_datasets
from primus_odc.data.keys import DataConfig, parse_data
from primus_odc.data.progress import with_progress
from primus_odc.data.records import Form
from primus_odc.data.samples import Sample
from primus_odc.data.sources import JsonlSource, ParquetSource, Source
from primus_odc.data.stdlib import StdlibSource
from primus_odc.data.stream import MinibatchStream
from primus_odc.data.template import TEMPLATE_VERSION, Template, render
from primus_odc.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, RwkvTokenizer, Tokenizer
from primus_odc.errors import ConfigError, DataError

Split = Literal["train", "validation"]
OverLength = Literal["error", "truncate"]

_log = logging.getLogger(__name__)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PIECE_NUMBER = re.compile(r"#\d+$")


def build_dataset(
    params: Mapping[str, Any],
    split: Split = "train",
    *,
    workspace: Path,
    max_tokens: int,
    over_length: OverLength,
    cache_timeout_s: float = 3600.0,
) -> TokenDataset:
    """The training or validation part of an experiment's data; every rank calls it and gets the same.

    Samples over the cap are settled here, before the first step: with ``error`` they are refused in one message, with ``truncate``
    they keep their first ``max_tokens`` tokens, and how many were cut is logged as a warning and stays in ``TokenDataset.truncated``.

    Args:
        params: keys of the trainer module, see :class:`primus_odc.data.keys.DataConfig`.
        split: ``train``, or ``validation`` (the part kept by ``sft_validation_fraction``).
        workspace: the experiment's output folder; token caches go below it unless ``data_cache_path`` is set.
        max_tokens: most tokens a microbatch, hence a sample, may have.
        over_length: what to do with a longer sample.
        cache_timeout_s: seconds to wait for another process of this host that is building the cache.

    Raises:
        ConfigError: wrong keys, all problems at once.
        DataError: unreadable data, a damaged cache, an empty split, samples over the cap, training data without any target token.
    """
    config = parse_data(params)
    tokenizer = build_tokenizer(params)
    source = build_source(config)
    parts = {
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "template": f"{config.sft_conversation_format}-{TEMPLATE_VERSION}",
        "max_samples": config.sft_max_samples,
    }
    title = f"{source.name}, tokenizer {tokenizer.name}"
    samples = _tokenize(source, tokenizer, config.sft_conversation_format, config.sft_max_samples)
    cache = open_or_build(config.data_cache_path or workspace / "token_cache", parts, samples, title, cache_timeout_s)
    held_out = np.array([in_validation(sample_id, config.sft_validation_fraction) for sample_id in cache.ids])
    ours = held_out == (split == "validation")
    long_enough = np.diff(cache.offsets) >= config.sft_min_tokens
    rows = np.flatnonzero(ours & long_enough)
    if rows.size == 0:
        raise DataError(empty_part(split, source, len(cache.ids), config))
    if rows.size < np.count_nonzero(ours):
        left_out, of = np.count_nonzero(ours & ~long_enough), np.count_nonzero(ours)
        _log.warning("%s: %d of %d samples left out: fewer than sft_min_tokens = %d tokens", split, left_out, of, config.sft_min_tokens)
    dataset = TokenDataset(cache, rows.tolist(), max_tokens if over_length == "truncate" else None)
    dataset.require_at_most(max_tokens)
    if dataset.truncated:
        _log.warning("%s: %d of %d samples truncated to their first %d tokens", split, dataset.truncated, len(dataset), max_tokens)
    if split == "train" and not dataset.target_counts.any():
        raise DataError(_no_target(dataset, source, config.sft_conversation_format, max_tokens))
    return dataset


def empty_part(split: str, source: Source, samples: int, config: DataConfig) -> str:
    """That a part of ``source`` has none of its ``samples``."""
    return (
        f"the {split} part of {source.name} is empty: {samples} samples with sft_validation_fraction "
        f"{config.sft_validation_fraction:g} and sft_min_tokens {config.sft_min_tokens}; change these or give more samples"
    )


def too_large(global_batch_size: int, samples: int) -> str:
    """That a step has more samples than there are ``samples`` to train on."""
    return (
        f"global_batch_size: {global_batch_size} is more than the {samples} samples to train on, so every step would hold some of them "
        f"more than once; set it to at most {samples}, or give more samples (sft_max_samples, sft_min_tokens and sft_validation_fraction "
        "leave some out)"
    )


def build_stream(dataset: TokenDataset, global_batch_size: int, seed: int) -> MinibatchStream:
    """The minibatches of training on ``dataset``, from its beginning.

    Where an epoch ends within a minibatch, that one may hold a sample of the old epoch and of the new one; otherwise none holds one twice.

    Raises:
        DataError: a minibatch has more samples than the dataset.
    """
    if global_batch_size > len(dataset):
        raise DataError(too_large(global_batch_size, len(dataset)))
    return MinibatchStream(len(dataset), global_batch_size, seed, dataset.fingerprint)


def _no_target(dataset: TokenDataset, source: Source, template: Template, max_tokens: int) -> str:
    """Training data without a target would be trained to the end, every step skipped."""
    if template == "text":
        rule, advice = "every token of a document but its first", "give longer documents"
    else:
        rule = "replies only (the assistant's turns, or the response to a prompt)"
        advice = "give samples with replies, or documents with sft_conversation_format: text"
    if dataset.truncated:
        cut = f"samples are cut to {max_tokens} tokens ({dataset.truncated} of them were)"
        advice = f"{cut}: raise odc.max_tokens_per_microbatch (or seq_length), or {advice}"
    return f"{source.name}: none of the {len(dataset)} samples to train on has a target token; loss is taken on {rule}; {advice}"


def check_data(params: Mapping[str, Any]) -> None:
    """Find out without reading a sample whether an experiment's data and tokenizer can be used. Names of the hub are not looked up.

    Raises:
        ConfigError: wrong keys, files that are not there or packages that are missing, all at once.
    """
    problems = Problems()
    config = problems.of(lambda: parse_data(params))
    name = params.get("sft_dataset_name")
    if config is not None:
        problems.of(lambda: build_tokenizer(params))
        hub = is_hub_name(config.sft_dataset_name)
        problems.of(lambda: import_datasets(config.sft_dataset_name) if hub else build_source(config))
    elif isinstance(name, str) and name:
        problems.of(lambda: _require_source(name))
    problems.raise_any()


def build_tokenizer(params: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of an experiment.

    Raises:
        ConfigError: wrong keys, all problems at once.
        DataError: a package or file is missing or unusable.
    """
    config = parse_data(params)
    if config.tokenizer_type == "byte":
        return ByteTokenizer()
    if config.tokenizer_type == "rwkv":
        return RwkvTokenizer()
    return HuggingFaceTokenizer(Path(config.tokenizer_model or "").expanduser(), config.tokenizer_eos_token)


def build_source(config: DataConfig) -> Source:
    """The source that ``sft_dataset_name`` means.

    Raises:
        ConfigError: the name is neither ``stdlib``, nor an existing path, nor of the form of a hub name.
        DataError: the path cannot be read as a dataset, or a package is missing.
    """
    name = config.sft_dataset_name
    form: Form = "text" if config.sft_conversation_format == "text" else "conversation"
    _require_source(name)
    if name == "stdlib":
        return StdlibSource(config.sft_stdlib_unit, form)
    if is_hub_name(name):
        return hub_source(name, config.sft_dataset_split, form)
    path = Path(name).expanduser()
    if path.is_dir():
        return folder_source(path, config.sft_dataset_split, form)
    return (JsonlSource if path.suffix == ".jsonl" else ParquetSource)([path], path.parent, form)


def _require_source(name: str) -> None:
    """The last word on ``sft_dataset_name``, without opening anything.

    Raises:
        ConfigError: the name is none that :func:`build_source` knows.
    """
    path = Path(name).expanduser()
    if name == "stdlib" or is_hub_name(name) or path.is_dir() or (path.is_file() and path.suffix in (".jsonl", ".parquet")):
        return
    if path.exists():
        raise ConfigError([f"sft_dataset_name is {name!r}; a file must end in .jsonl or .parquet"])
    near = likely(name, ["stdlib"])
    if near is None and path.parent.is_dir():
        neighbour = likely(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        near = str(path.with_name(neighbour)) if neighbour else None
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError([f"sft_dataset_name is {name!r}: no such path; give stdlib, a path, or a name owner/dataset of the hub{hint}"])


def is_hub_name(name: str) -> bool:
    """Whether ``sft_dataset_name: name`` is to be looked for on the hub."""
    path = Path(name).expanduser()
    return not path.exists() and not path.suffix and _HUB_NAME.fullmatch(name) is not None


def in_validation(sample_id: str, fraction: float) -> bool:
    """Whether a sample is held out: by a hash of its id, so for ever the same; pieces of one file stay together."""
    digest = hashlib.sha256(_PIECE_NUMBER.sub("", sample_id).encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _tokenize(source: Source, tokenizer: Tokenizer, template: Template, limit: int | None) -> Iterator[Sample]:
    total = len(source) if limit is None else min(limit, len(source))
    for record in with_progress(itertools.islice(source, limit), total, f"tokenizing {source.name}"):
        yield render(record, tokenizer, template)
