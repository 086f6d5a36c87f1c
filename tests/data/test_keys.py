from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus_odc._config_values import likely
from primus_odc.data.keys import parse_data
from primus_odc.errors import ConfigError

LEAST = {"sft_dataset_name": "stdlib", "tokenizer_type": "byte"}


def test_defaults() -> None:
    config = parse_data(LEAST)
    assert config.sft_conversation_format == "text" and config.sft_stdlib_unit == "definition" and config.sft_dataset_split == "train"
    assert config.sft_max_samples is None and config.sft_validation_fraction == 0.0 and config.data_cache_path is None
    assert parse_data({**LEAST, "sft_dataset_name": "a.jsonl"}).sft_conversation_format == "messages"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sft_conversation_format", "openai", "messages"),
        ("sft_conversation_format", "chatml", "messages"),
        ("sft_conversation_format", "plain", "plain"),
        ("sft_stdlib_unit", "file", "file"),
        ("sft_max_samples", 3, 3),
        ("sft_validation_fraction", 0.25, 0.25),
        ("data_cache_path", "/some/where", Path("/some/where")),
        ("tokenizer_type", "rwkv", "rwkv"),
    ],
)
def test_values(key: str, value: Any, expected: Any) -> None:
    assert getattr(parse_data({**LEAST, key: value}), key) == expected


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tokenizer_type", "rwvk", "tokenizer_type is 'rwvk'; allowed: byte, rwkv, HuggingFaceTokenizer; did you mean rwkv?"),
        ("tokenizer_type", "huggingfacetokeniser", "did you mean HuggingFaceTokenizer?"),
        ("tokenizer_type", None, "tokenizer_type is missing; allowed: byte"),
        ("tokenizer_type", "HuggingFaceTokenizer", "tokenizer_model is missing"),
        ("sft_dataset_name", None, "sft_dataset_name is missing"),
        ("sft_conversation_format", "mesages", "did you mean messages?"),
        ("sft_conversation_format", "alpaca", "allowed: messages, openai, chatml, plain, text"),
        ("sft_stdlib_unit", "fil", "did you mean file?"),
        ("sft_max_samples", 0, "sft_max_samples is 0; it must be a whole number of at least 1"),
        ("sft_min_tokens", -1, "sft_min_tokens is -1; it must be a whole number of at least 0"),
        ("sft_max_samples", True, "sft_max_samples is True"),
        ("sft_validation_fraction", 1, "sft_validation_fraction is 1; it must be a number from 0 to below 1"),
        ("sft_validation_fraction", "0.1", "sft_validation_fraction is '0.1'"),
        ("sft_dataset_split", 3, "sft_dataset_split is 3; it must be text"),
        ("sft_dataset_split", "a\0", "it must be text"),
        ("tokenizer_type", ["byte"], r"tokenizer_type is \['byte'\]; allowed: byte"),
        ("sft_conversation_format", {"a": 1}, "sft_conversation_format is {'a': 1}; allowed: messages"),
        ("sft_stdlib_unit", [], "allowed: definition"),
        ("sft_dataset_name", "~nobody-here/x", "sft_dataset_name is the text '~nobody-here/x', and there is no such home folder"),
        ("tokenizer_model", "~nobody-here/x", "no such home folder"),
        ("data_cache_path", "~nobody-here/x", "no such home folder"),
        ("sft_dataset_nmae", "x", "sft_dataset_nmae is no key of the data; allowed: .*; did you mean sft_dataset_name?"),
    ],
)
def test_refusals(key: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")):
        parse_data({**LEAST, key: value})


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_data({"sft_stdlib_unit": "fil", "sft_max_samples": -1, "tokenizer_type": "bite"})
    assert len(error.value.problems) == 4


def test_keys_that_primus_adds_are_accepted() -> None:
    parse_data({**LEAST, "sft_bridge_compat_inline_bos": False, "sft_sanitize_nan_grads": False, "seq_length": 4096})


def test_likely_names() -> None:
    assert likely("STDLB", ["stdlib"]) == "stdlib" and likely("wikipedia", ["stdlib"]) is None
