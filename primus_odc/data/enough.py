"""Whether data have as many samples as a step needs, found out by reading no more of them than that."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from primus_odc.data.build import build_source, build_tokenizer, empty_part, in_validation, is_hub_name, too_large
from primus_odc.data.keys import parse_data
from primus_odc.data.template import render
from primus_odc.errors import DataError


def require_samples(params: Mapping[str, Any], global_batch_size: int, *, evaluates: bool) -> None:
    """Refuse what training would refuse for too few samples, before it starts. Names of the hub are not looked up.

    Reads records until there are ``global_batch_size`` to train on and, with ``evaluates``, one to validate on. They are tokenized only
    where ``sft_min_tokens`` asks how long they are.

    Args:
        params: keys of the trainer module, see :class:`primus_odc.data.keys.DataConfig`.
        global_batch_size: samples of one optimizer step over all ranks.
        evaluates: whether a validation part is needed.

    Raises:
        ConfigError: wrong keys.
        DataError: unreadable data, no sample to train or validate on, fewer to train on than a step needs.
    """
    config = parse_data(params)
    if is_hub_name(config.sft_dataset_name):
        return
    source, tokenizer = build_source(config), build_tokenizer(params)
    missing = {"train": global_batch_size, "validation": int(evaluates)}
    read = 0
    for record in itertools.islice(source, config.sft_max_samples):
        read += 1
        part = "validation" if in_validation(record.sample_id, config.sft_validation_fraction) else "train"
        if missing[part] <= 0:
            continue
        if config.sft_min_tokens and render(record, tokenizer, config.sft_conversation_format).tokens.size < config.sft_min_tokens:
            continue
        missing[part] -= 1
        if not any(missing.values()):
            return
    found = global_batch_size - missing["train"]
    if found == 0:
        raise DataError(empty_part("train", source, read, config))
    if missing["train"]:
        raise DataError(too_large(global_batch_size, found))
    raise DataError(empty_part("validation", source, read, config))
