"""Turn one JSON-like row into a :class:`Record`.

Accepted rows, told apart by their keys:

* chat: ``messages``, a list of ``{"role": ..., "content": ...}`` (or that list as a JSON string); roles are system, user, assistant and
  tool; a content may also be a list of ``{"type": "text", "text": ...}`` parts;
* prompt and response: ``prompt`` (or ``instruction``, ``question``) with ``response`` (or ``output``, ``answer``, ``completion``);
  a non-empty ``input`` (or ``context``) is appended to the prompt after an empty line, and is the prompt where there is no other;
  ``system`` becomes a system turn;
* text: ``text``, one document; only when the text form is asked for, since many chat datasets carry a rendered ``text`` column too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from primus_odc.data.samples import Record, Role, Turn
from primus_odc.errors import DataError

Form = Literal["conversation", "text"]
"""How a source is read: as turns with loss on the replies, or as whole documents with loss on every token but the first."""

CHAT_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
_PROMPT_KEYS = ("prompt", "instruction", "question")
_RESPONSE_KEYS = ("response", "output", "answer", "completion")
_INPUT_KEYS = ("input", "context")


def parse_record(row: Mapping[str, Any], sample_id: str, form: Form) -> Record:
    """Read one row.

    Raises:
        DataError: the row has none of the accepted forms, an unknown role, or a value that is not text; names the sample and the key.
    """
    if form == "text":
        if "text" not in row:
            raise DataError(f"sample {sample_id!r}: the text form needs the key 'text', found {sorted(row)}")
        return Record(sample_id=sample_id, turns=(Turn(role="text", text=_text(row["text"], "text", sample_id)),))
    if row.get("messages") is not None:
        return Record(sample_id=sample_id, turns=_chat_turns(row["messages"], sample_id))
    return Record(sample_id=sample_id, turns=_prompt_turns(row, sample_id))


def _chat_turns(messages: Any, sample_id: str) -> tuple[Turn, ...]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise DataError(f"sample {sample_id!r}: 'messages' is a string but not JSON ({error})") from error
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping):
        raise DataError(f"sample {sample_id!r}: 'messages' must be a list of {{role, content}}, not {type(messages).__name__}")
    turns = tuple(_chat_turn(message, f"messages[{i}]", sample_id) for i, message in enumerate(messages))
    if not turns:
        raise DataError(f"sample {sample_id!r}: 'messages' is empty")
    return turns


def _chat_turn(message: Any, key: str, sample_id: str) -> Turn:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise DataError(f"sample {sample_id!r}: {key} must have the keys 'role' and 'content'")
    if message.get("tool_calls"):
        raise DataError(f"sample {sample_id!r}: {key} holds 'tool_calls', which no template here renders; write them into its 'content'")
    role, content = message["role"], message["content"]
    if role not in CHAT_ROLES:
        near = difflib.get_close_matches(str(role), CHAT_ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"sample {sample_id!r}: {key} has the role {role!r}; allowed are {', '.join(CHAT_ROLES)}{hint}")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise DataError(f"sample {sample_id!r}: {key} has parts other than {{'type': 'text', 'text': ...}}")
        content = "".join(_text(part.get("text"), f"{key}.content", sample_id) for part in content)
    return Turn(role=cast(Role, role), text=_text(content, f"{key}.content", sample_id))


def _prompt_turns(row: Mapping[str, Any], sample_id: str) -> tuple[Turn, ...]:
    prompt, response = _first(row, _PROMPT_KEYS, sample_id), _first(row, _RESPONSE_KEYS, sample_id)
    context = _first(row, _INPUT_KEYS, sample_id)
    asks_nothing = prompt is None and context is None
    if response is None or asks_nothing:
        # What could have made it a record: a key of these that is there holds null.
        wanted = ("messages", *(_RESPONSE_KEYS if response is None else ()), *(_PROMPT_KEYS + _INPUT_KEYS if asks_nothing else ()))
        null = " and ".join(repr(key) for key in wanted if key in row)
        fault = f"the value of {null} is null, and no other accepted form is" if null else "no accepted form"
        raise DataError(
            f"sample {sample_id!r}: {fault} among the keys {sorted(row)}; give 'messages', or one of {', '.join(_PROMPT_KEYS)} "
            f"with one of {', '.join(_RESPONSE_KEYS)}, or ask for the text form and give 'text'"
        )
    asked = "\n\n".join(part for part in (prompt, context) if part)
    system = _first(row, ("system",), sample_id)
    turns = (Turn(role="user", text=asked), Turn(role="assistant", text=response))
    return (Turn(role="system", text=system), *turns) if system else turns


def _first(row: Mapping[str, Any], keys: Iterable[str], sample_id: str) -> str | None:
    """The value of the one key present with a value; two of them would leave open which is meant."""
    present = [key for key in keys if row.get(key) is not None]
    if len(present) > 1:
        raise DataError(f"sample {sample_id!r}: {' and '.join(present)} mean the same; keep one of them")
    return _text(row[present[0]], present[0], sample_id) if present else None


def _text(value: Any, key: str, sample_id: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"sample {sample_id!r}: {key} must be text, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"sample {sample_id!r}: {key} is not valid Unicode text ({error.reason} at character {error.start})") from error
    return value
