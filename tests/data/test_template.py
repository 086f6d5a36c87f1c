from __future__ import annotations

import numpy as np
import pytest

from primus_odc.data.samples import Record, Role, Turn
from primus_odc.data.template import render
from primus_odc.data.tokenizers import ByteTokenizer
from primus_odc.errors import DataError

BOS, EOS = 257, 258


def record(*turns: tuple[Role, str]) -> Record:
    return Record(sample_id="r", turns=tuple(Turn(role=role, text=text) for role, text in turns))


class MarkerTokenizer(ByteTokenizer):
    """Bytes, no prefix, and the two chat markers as ids of their own."""

    prefix_ids: tuple[int, ...] = ()

    def special_id(self, text: str) -> int | None:
        return {"<|im_start|>": 300, "<|im_end|>": 301}.get(text)


def test_messages_with_special_ids_by_hand() -> None:
    sample = render(record(("user", "Q"), ("assistant", "AB"), ("user", "R"), ("assistant", "C")), MarkerTokenizer(), "messages")
    expected = [
        300,
        *b"user\nQ",
        301,
        10,
        300,
        *b"assistant\n",
        *b"AB",
        EOS,
        10,
        300,
        *b"user\nR",
        301,
        10,
        300,
        *b"assistant\n",
        *b"C",
        EOS,
    ]
    assert sample.tokens.tolist() == expected and sample.tokens.dtype == np.int32
    # Positions: 8 of the first user turn, newline, marker, "assistant\n" (10), then A B EOS; and so on.
    assert np.flatnonzero(sample.target_mask).tolist() == [20, 21, 22, 44, 45]
    assert sample.tokens[sample.target_mask].tolist() == [*b"AB", EOS, *b"C", EOS]


def test_messages_with_markers_as_text() -> None:
    sample = render(record(("system", "S"), ("user", "é"), ("assistant", "ok")), ByteTokenizer(), "messages")
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    assert sample.tokens.tolist() == [BOS, *text.encode(), *b"ok", EOS]
    assert sample.target_mask.tolist() == [False] * (1 + len(text.encode())) + [True] * 3


def test_messages_without_a_reply_have_no_target() -> None:
    assert not render(record(("user", "Q"), ("tool", "T")), ByteTokenizer(), "messages").target_mask.any()


def test_plain_by_hand() -> None:
    sample = render(record(("system", "S"), ("user", "P"), ("assistant", "")), ByteTokenizer(), "plain")
    assert sample.tokens.tolist() == [BOS, *b"S\n\nP", EOS]
    assert sample.target_mask.tolist() == [False] * 5 + [True]


def test_text_counts_everything_but_the_first_token() -> None:
    assert render(record(("text", "ab")), ByteTokenizer(), "text").tokens.tolist() == [BOS, 97, 98, EOS]
    sample = render(record(("text", "ab")), MarkerTokenizer(), "text")
    assert sample.tokens.tolist() == [97, 98, EOS] and sample.target_mask.tolist() == [False, True, True]


@pytest.mark.parametrize("template", ["messages", "plain", "text"])
def test_a_template_refuses_other_forms(template: str) -> None:
    wrong = {
        "messages": record(("text", "t")),
        "plain": record(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
        "text": record(("user", "a"), ("assistant", "b")),
    }[template]
    with pytest.raises(DataError, match=f"'r'.*template {template}"):
        render(wrong, ByteTokenizer(), template)  # type: ignore[arg-type]
