from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import primus_odc.megatron
from primus_odc.data.keys import DataConfig
from primus_odc.errors import ConfigError
from primus_odc.experiment import load_experiment
from primus_odc.megatron import gpt_config
from primus_odc.megatron.train_config import normalise, parse_train
from primus_odc.megatron.train_keys import IGNORED_KEYS, KNOWN_KEYS, check_keys

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
LOOP = {"train_iters": 3, "global_batch_size": 8, "distributed_backend": "gloo"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_own_files_are_accepted(path: Path) -> None:
    params = normalise(load_experiment(path).params)
    check_keys(params)
    assert parse_train(params).train_iters == params["train_iters"]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("trani_iters", "train_iters"), ("num_layer", "num_layers"), ("eval_intervall", "eval_interval"), ("use_flash_atn", "use_flash_attn")],
)
def test_unknown_keys_are_answered_with_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{typo} is not known .* did you mean '{meant}'"):
        check_keys({**LOOP, typo: 1})


def test_a_block_that_is_switched_off_asks_for_nothing() -> None:
    parse_train({**LOOP, "lora": {"enabled": False, "dim": 32}})
    with pytest.raises(ConfigError, match=r"lora: .* is not supported"):
        parse_train({**LOOP, "lora": {"enabled": True, "dim": 32}})


def test_all_wrong_keys_are_named_at_once() -> None:
    wrong = {
        "train_iters": 0,
        "global_batch_size": "many",
        "save_interval": 2.5,
        "save": 3,
        "distributed_backend": "mpi",
        "ckpt_step": 4,
        "eval_interval": 5,
        "clip_grad": -1,
        "adam_beta2": 1,
        "bf16": "yes",
        "optimizer": "sgd",
        "calculate_per_token_loss": False,
        "micro_batch_size": 2,
    }
    with pytest.raises(ConfigError) as caught:
        parse_train(wrong)
    assert len(caught.value.problems) == len(wrong)
    for key in wrong:
        assert any(key in problem for problem in caught.value.problems), key


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("seed", 2**32, 2**32 - 1),
        ("distributed_timeout_minutes", 10000, 9999.5),
        ("adam_eps", 0, 1e-15),
        ("adam_eps", 1e-46, 2.0**-126),  # 1e-46 is 0 in fp32
        ("train_iters", 10**400, 10**6),
    ],
)
def test_bounds(key: str, refused: Any, accepted: Any) -> None:
    parse_train(normalise({**LOOP, key: accepted}))
    with pytest.raises(ConfigError, match=f"{key} is .*; it must be a .*number of at least"):
        parse_train(normalise({**LOOP, key: refused}))


@pytest.mark.parametrize("key", ["save", "load"])
def test_folders_are_folders(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for value, reason in (
        (str(tmp_path / "file"), "which is a file; it must be the path of a folder"),
        ("a\0b", "it must be the path of a folder"),
        ("~no-such-user/a", "no such home folder"),
    ):
        with pytest.raises(ConfigError, match=f"{key} is the text .*{reason}"):
            parse_train({**LOOP, key: value})
    parse_train({**LOOP, key: str(tmp_path)})
    parse_train({**LOOP, key: str(tmp_path / "new")})


def test_text_that_spells_a_number_is_one_except_where_a_text_is_meant() -> None:
    assert normalise({"a": "nan", "b": math.inf, "c": "-5"}) == {"a": "nan", "b": "inf", "c": -5}
    given = {**LOOP, "lr": "1e-4", "train_iters": "12", "save": "7", "tokenizer_model": "1e3", "normalization": "RMSNorm", "bf16": False}
    params = normalise(given)
    assert params["lr"] == 1e-4 and params["train_iters"] == 12 and isinstance(params["train_iters"], int)
    assert (params["save"], params["tokenizer_model"], params["normalization"], params["bf16"]) == ("7", "1e3", "RMSNorm", False)
    config = parse_train(params)
    assert config.save == Path("7") and config.load is None and config.eval_interval is None


@pytest.mark.parametrize(
    ("keys", "evaluates"),
    [
        ({"eval_interval": 5, "sft_validation_fraction": 0.1}, True),
        ({"eval_interval": 5, "eval_iters": 0}, False),
        ({"eval_interval": 0, "eval_iters": 3}, False),
        ({"eval_interval": None}, False),
        ({"eval_iters": 3}, False),
    ],
)
def test_evaluation_is_off_without_iterations_or_interval(keys: dict[str, Any], evaluates: bool) -> None:
    assert parse_train({**LOOP, **keys}).evaluates == evaluates


def test_an_interval_of_0_is_none() -> None:
    config = parse_train({**LOOP, "save_interval": 0, "exit_interval": 0})
    assert config.save_interval is None and config.exit_interval is None


@pytest.mark.parametrize(("tokens", "rows"), [(259, 384), (384, 384), (385, 512)])
def test_vocabulary_is_padded_as_megatron_pads_it(tokens: int, rows: int) -> None:
    assert parse_train(LOOP).padded_vocab_size(tokens) == rows


def test_every_key_that_is_read_is_known() -> None:
    folder = Path(primus_odc.megatron.__file__).parent
    modules = ("schedule", "sharding", "arm", "trainer", "run_options", "train_config", "gpt_config")
    read = {key for name in modules for key in _read_keys((folder / f"{name}.py").read_text())}
    read |= set(gpt_config._FIXED) | set(DataConfig.__dataclass_fields__)
    assert {"lr", "bf16", "adam_eps", "seq_length", "num_layers", "save", "eval_iters", "lr_warmup_fraction"} <= read
    assert read - set(KNOWN_KEYS) == set()


def _read_keys(source: str) -> set[str]:
    """Keys in params.get("..."), number("..."), keys.flag("..."), params["..."] and the like."""
    calls = re.findall(r"(?:\bget|\bnumber|\bcount|\binterval|\bfolder|keys\.(?:optional|flag|choice))\(\s*\"([a-z]\w*)\"", source)
    return set(calls) | set(re.findall(r"params\[\"(\w+)\"\]", source))


def test_no_key_is_both_read_and_ignored() -> None:
    assert set(KNOWN_KEYS) & set(IGNORED_KEYS) == set()
    assert len(set(KNOWN_KEYS)) == len(KNOWN_KEYS) and len(set(IGNORED_KEYS)) == len(IGNORED_KEYS)
