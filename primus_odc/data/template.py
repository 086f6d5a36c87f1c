"""Render a record as tokens.

Every segment is tokenized by itself. So the border between prompt and reply is a border between tokens, and the model is trained on exactly
the prompt tokens it sees when it is asked later. Every sample starts with the tokenizer's ``prefix_ids``.

``messages``: one turn after the other, separated by a newline, each as

    <|im_start|>ROLE⏎ CONTENT END

where END is ``<|im_end|>``, but the tokenizer's end-of-document id after an assistant's turn. Loss: the content of every assistant turn
and the id that ends it. A marker is one special id where the vocabulary has it, plain text otherwise.

``plain``: prompt, reply, end-of-document id, without markers; a system text and an empty line stand before the prompt. Only for one
prompt with one reply. Loss: the reply and its end.

``text``: one document and the end-of-document id. Loss: every token but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from primus_odc.data.samples import Record, Sample
from primus_odc.data.tokenizers import TokenArray, Tokenizer
from primus_odc.errors import DataError

Template = Literal["messages", "plain", "text"]

TEMPLATE_VERSION = 1
"""Part of the key of every token cache: to be raised when a rendering changes."""

Segments = Iterator[tuple[TokenArray, bool]]
"""Tokens, and whether they are targets."""


def render(record: Record, tokenizer: Tokenizer, template: Template) -> Sample:
    """Tokens and target mask of one record.

    Raises:
        DataError: the record does not have the form the template is for.
    """
    segments = [(_ids(*tokenizer.prefix_ids), False), *_SEGMENTS[template](record, tokenizer)]
    tokens = np.concatenate([ids for ids, _ in segments])
    target_mask = np.concatenate([np.full(ids.size, target, dtype=np.bool_) for ids, target in segments])
    target_mask[0] = False
    return Sample(sample_id=record.sample_id, tokens=tokens, target_mask=target_mask)


def _messages(record: Record, tokenizer: Tokenizer) -> Segments:
    start, end = _marker("<|im_start|>", tokenizer), _marker("<|im_end|>", tokenizer)
    for i, turn in enumerate(record.turns):
        if turn.role == "text":
            raise DataError(f"sample {record.sample_id!r}: template messages is for conversations; choose sft_conversation_format text")
        reply = turn.role == "assistant"
        if i:
            yield tokenizer.encode("\n"), False
        yield start, False
        yield tokenizer.encode(f"{turn.role}\n"), False
        yield tokenizer.encode(turn.text), reply
        yield (_ids(tokenizer.eos_id), True) if reply else (end, False)


def _plain(record: Record, tokenizer: Tokenizer) -> Segments:
    roles = tuple(turn.role for turn in record.turns)
    if roles not in (("user", "assistant"), ("system", "user", "assistant")):
        raise DataError(
            f"sample {record.sample_id!r}: template plain is for one prompt and one reply, here are the turns {', '.join(roles)}; "
            "choose sft_conversation_format messages"
        )
    *asked, reply = record.turns
    yield tokenizer.encode("\n\n".join(turn.text for turn in asked)), False
    yield tokenizer.encode(reply.text), True
    yield _ids(tokenizer.eos_id), True


def _text(record: Record, tokenizer: Tokenizer) -> Segments:
    if [turn.role for turn in record.turns] != ["text"]:
        raise DataError(f"sample {record.sample_id!r}: template text is for whole documents, not for conversations")
    yield tokenizer.encode(record.turns[0].text), True
    yield _ids(tokenizer.eos_id), True


_SEGMENTS = {"messages": _messages, "plain": _plain, "text": _text}


def _marker(spelling: str, tokenizer: Tokenizer) -> TokenArray:
    special = tokenizer.special_id(spelling)
    return tokenizer.encode(spelling) if special is None else _ids(special)


def _ids(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)
