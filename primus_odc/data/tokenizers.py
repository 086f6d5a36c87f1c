"""Tokenizers behind one small interface.

* ``byte``: the UTF-8 bytes themselves; needs no package.
* ``rwkv``: the 65,536-token vocabulary of the ``rwkv`` package, greedy longest match in pure Python (about two million characters a second,
  so nothing is cached here).
* ``HuggingFaceTokenizer``: a ``tokenizer.json`` or a local model folder that holds one.

``encode`` treats its argument as ordinary text: a document that happens to contain the spelling of a special token does not end there.
Special tokens come in by id only, through ``eos_id``, ``prefix_ids`` and ``special_id``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from primus_odc.data.optional import optional_import
from primus_odc.errors import DataError

TokenArray = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """What the data part needs of a tokenizer."""

    @property
    def name(self) -> str:
        """For messages and manifests."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id ``encode`` or a special id can give."""

    @property
    def eos_id(self) -> int:
        """End of a document or reply."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What every sample starts with (a begin-of-sequence id, or nothing)."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides the ids."""

    def encode(self, text: str) -> TokenArray:
        """Ids of ``text``, int32 of shape [T], without special tokens; T = 0 for empty text."""

    def special_id(self, text: str) -> int | None:
        """Id of the special token spelt ``text``, None where the vocabulary has none."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then three special ids."""

    name = "byte"
    pad_id, bos_id, eos_id = 256, 257, 258
    vocab_size = 259
    prefix_ids: tuple[int, ...] = (bos_id,)
    fingerprint = "byte-1"

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def special_id(self, text: str) -> int | None:
        return None


class RwkvTokenizer:
    """The World vocabulary of the ``rwkv`` package (ids 1 to 65,529; id 0 ends a document).

    The vocabulary takes two seconds and 0.3 GB to load, so that happens at the first ``encode``: a process that only opens a cache
    never pays it.

    Raises:
        DataError: the package is not installed, or ships no vocabulary.
    """

    name = "rwkv"
    vocab_size = 65536
    eos_id = 0
    prefix_ids: tuple[int, ...] = ()
    _vocabulary_file = "rwkv_vocab_v20230424.txt"

    def __init__(self) -> None:
        spec = importlib.util.find_spec("rwkv")
        if spec is None or not spec.submodule_search_locations:
            raise DataError("tokenizer_type rwkv needs the package rwkv: pip install rwkv==0.8.32, or choose tokenizer_type byte")
        self._path = Path(spec.submodule_search_locations[0]) / self._vocabulary_file
        if not self._path.is_file():
            raise DataError(f"the installed package rwkv has no {self._vocabulary_file}: pip install rwkv==0.8.32")

    @cached_property
    def fingerprint(self) -> str:
        return "rwkv-" + hashlib.sha256(self._path.read_bytes()).hexdigest()

    @cached_property
    def _trie(self) -> Any:
        # This module of the package is free of torch; rwkv.utils and rwkv.model are not.
        return importlib.import_module("rwkv.rwkv_tokenizer").TRIE_TOKENIZER(str(self._path))

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._trie.encode(text), dtype=np.int32)

    def special_id(self, text: str) -> int | None:
        return None


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` package.

    The end-of-document token is ``eos_token``, else the ``eos_token`` of a ``tokenizer_config.json`` beside the file; it is not guessed.
    The prefix is what the file's own post-processor puts before an empty text.

    Args:
        path: the JSON file, or a folder with ``tokenizer.json`` in it.
        eos_token: spelling of the end-of-document token.

    Raises:
        DataError: the package or the file is missing, the file is not a tokenizer, or its end-of-document token is unknown.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"tokenizer_model {str(path)!r}: {str(file)!r} is no file; give a local tokenizer.json or a folder that holds one "
                "(a model of the hub is downloaded first, a slow tokenizer is saved again as a fast one)"
            )
        library = optional_import("tokenizers", "tokenizers", f"tokenizer_model {str(path)!r}")
        raw = file.read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_str(raw.decode("utf-8"))
        # The package raises bare Exception for every defect of a file.
        except Exception as error:
            raise DataError(f"tokenizer_model {str(file)!r} is not a tokenizer of the tokenizers package: {error}") from error
        # A file may carry the truncation and padding of whoever saved it; both would change samples unseen.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos_token = eos_token or _configured_eos(file.with_name("tokenizer_config.json"))
        if eos_token is None:
            raise DataError(f"tokenizer_model {str(file)!r} does not say which token ends a document; set tokenizer_eos_token")
        eos_id = self._tokenizer.token_to_id(eos_token)
        if eos_id is None:
            raise DataError(f"tokenizer_model {str(file)!r} has no token {eos_token!r}; correct tokenizer_eos_token")
        self.name = f"HuggingFaceTokenizer {file}"
        self.eos_id: int = eos_id
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.prefix_ids: tuple[int, ...] = tuple(_before(self._tokenizer.encode("", add_special_tokens=True).ids, eos_id))
        self.fingerprint = "hf-" + hashlib.sha256(raw + eos_token.encode("utf-8")).hexdigest()
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def special_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found


def _configured_eos(config_file: Path) -> str | None:
    if not config_file.is_file():
        return None
    token = json.loads(config_file.read_text(encoding="utf-8")).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _before(ids: list[int], stop: int) -> list[int]:
    return ids[: ids.index(stop)] if stop in ids else ids
