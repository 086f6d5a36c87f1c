from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from primus_odc.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, RwkvTokenizer
from primus_odc.errors import DataError


def test_byte_ids_are_utf8() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert tokenizer.encode("").shape == (0,)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258, 259)


def longest_match(text: str, ids: dict[bytes, int]) -> list[int]:
    """The definition of the RWKV tokenizer, by trying every length."""
    rest, found = text.encode(), []
    while rest:
        size = next(n for n in range(min(len(rest), 128), 0, -1) if rest[:n] in ids)
        found.append(ids[rest[:size]])
        rest = rest[size:]
    return found


def test_rwkv_is_the_longest_match_over_its_vocabulary() -> None:
    pytest.importorskip("rwkv")
    spec = importlib.util.find_spec("rwkv")
    assert spec is not None and spec.submodule_search_locations
    ids: dict[bytes, int] = {}
    for line in (Path(spec.submodule_search_locations[0]) / "rwkv_vocab_v20230424.txt").read_text(encoding="utf-8").splitlines():
        number, rest = line.split(" ", 1)
        token = ast.literal_eval(rest[: rest.rindex(" ")])
        ids[token.encode() if isinstance(token, str) else token] = int(number)
    tokenizer = RwkvTokenizer()
    assert "_trie" not in vars(tokenizer) and tokenizer.fingerprint.startswith("rwkv-")
    for text in ("def f(x):\n    return x ** 2\n", "naïve 漢字 \x00\u200b🙂", "        " * 20, ""):
        assert tokenizer.encode(text).tolist() == longest_match(text, ids)
    assert max(ids.values()) < tokenizer.vocab_size and tokenizer.eos_id not in ids.values()


def test_rwkv_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install rwkv==0\.8\.32"):
        RwkvTokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word tokenizer: <s> 0, </s> 1, <unk> 2, then words; saved with truncation and padding, and putting <s> before every text."""
    library: Any = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "x": 3, "y": 4, "<": 5, "s": 6, ">": 7}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = library.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return tmp_path


def test_hugging_face_folder_and_file(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.prefix_ids, tokenizer.vocab_size) == (1, (0,), 8)
    assert tokenizer.encode("x y x y x y").tolist() == [3, 4, 3, 4, 3, 4]
    assert tokenizer.special_id("<s>") == 0 and tokenizer.special_id("<|im_start|>") is None
    assert HuggingFaceTokenizer(folder / "tokenizer.json").fingerprint == tokenizer.fingerprint
    other_end = HuggingFaceTokenizer(folder, eos_token="y")
    assert other_end.eos_id == 4 and other_end.fingerprint != tokenizer.fingerprint


def test_a_text_that_spells_a_special_token_stays_text(folder: Path) -> None:
    assert HuggingFaceTokenizer(folder).encode("x <s> y").tolist() == [3, 5, 6, 7, 4]


def test_hugging_face_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no token '<eos>'"):
        HuggingFaceTokenizer(folder, eos_token="<eos>")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="set tokenizer_eos_token"):
        HuggingFaceTokenizer(folder)
    with pytest.raises(DataError, match=r"absent.*is no file"):
        HuggingFaceTokenizer(folder / "absent")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        HuggingFaceTokenizer(folder, eos_token="</s>")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        HuggingFaceTokenizer(folder, eos_token="</s>")
