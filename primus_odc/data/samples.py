"""What training sees of a document: its tokens, and which of them are predicted.

A :class:`Record` is a document as text, already cut into turns; a :class:`Sample` is the same document as tokens. Between them stand a
tokenizer and a template (:mod:`primus_odc.data.template`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from primus_odc.errors import DataError

Role = Literal["system", "user", "assistant", "tool", "text"]
"""Who speaks in a turn. ``text`` is a document that is learnt from its second token on; it stands alone in its record."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """One contribution to a conversation."""

    role: Role
    """The speaker; the replies of ``assistant`` (and a ``text`` document) carry the loss."""
    text: str
    """What is said, without any marker."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Record:
    """One document of a source, before tokenization."""

    sample_id: str
    """Unique within the source and stable from run to run; messages name the sample by it."""
    turns: tuple[Turn, ...]
    """At least one turn."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One document as tokens.

    Raises:
        DataError: no token at all, arrays of different shape or wrong dtype, or a first token marked as a target.
    """

    sample_id: str
    """Unique within the dataset."""
    tokens: npt.NDArray[np.int32]
    """Token ids, int32 of shape [T], T >= 1."""
    target_mask: npt.NDArray[np.bool_]
    """bool of shape [T]: token t is predicted from the tokens before it and counted in the loss. Never true at t = 0."""

    def __post_init__(self) -> None:
        tokens, mask = self.tokens, self.target_mask
        if tokens.ndim != 1 or tokens.shape != mask.shape or tokens.size == 0:
            raise DataError(
                f"sample {self.sample_id!r}: tokens {tokens.shape} and target_mask {mask.shape} must have one shape [T] with T >= 1"
            )
        if tokens.dtype != np.int32 or mask.dtype != np.bool_:
            raise DataError(f"sample {self.sample_id!r}: tokens must be int32 and target_mask bool, not {tokens.dtype} and {mask.dtype}")
        if mask[0]:
            raise DataError(f"sample {self.sample_id!r}: the first token has nothing before it and cannot be a target")
