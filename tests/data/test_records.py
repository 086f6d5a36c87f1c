from __future__ import annotations

import json
from typing import Any

import pytest

from primus_odc.data.records import Form, parse_record
from primus_odc.errors import DataError


def turns(row: dict[str, Any], form: Form = "conversation") -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in parse_record(row, "id", form).turns]


MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
CHAT = [("system", "S"), ("user", "U"), ("assistant", "A")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": MESSAGES}, CHAT),
        ({"messages": MESSAGES, "length": 4000}, CHAT),
        ({"messages": json.dumps(MESSAGES)}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]}]}, [("user", "UV")]),
        ({"messages": [{"role": "tool", "content": "T", "tool_calls": None}]}, [("tool", "T")]),
        ({"prompt": "P", "response": "R"}, [("user", "P"), ("assistant", "R")]),
        ({"instruction": "I", "input": "", "output": "O"}, [("user", "I"), ("assistant", "O")]),
        ({"instruction": "I", "input": "X", "output": "O", "text": "whole"}, [("user", "I\n\nX"), ("assistant", "O")]),
        ({"input": "X", "output": "O"}, [("user", "X"), ("assistant", "O")]),
        ({"question": "Q", "context": "C", "answer": "A"}, [("user", "Q\n\nC"), ("assistant", "A")]),
        ({"system": "S", "prompt": "P", "response": ""}, [("system", "S"), ("user", "P"), ("assistant", "")]),
        ({"messages": None, "prompt": "P", "completion": "R"}, [("user", "P"), ("assistant", "R")]),
    ],
)
def test_accepted_conversations(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(row) == expected


def test_text_form_reads_only_text() -> None:
    assert turns({"text": "whole", "prompt": "P"}, "text") == [("text", "whole")]
    with pytest.raises(DataError, match=r"'id'.*needs the key 'text', found \['prompt'\]"):
        turns({"prompt": "P"}, "text")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"promt": "P", "response": "R"}, r"no accepted form among the keys \['promt', 'response'\]"),
        ({"prompt": "P"}, r"no accepted form among the keys \['prompt'\]; give"),
        ({"prompt": "P", "input": None, "response": None}, r"the value of 'response' is null, .* \['input', 'prompt', 'response'\]; give"),
        ({"prompt": None, "input": None, "output": "O"}, "the value of 'prompt' and 'input' is null, "),
        ({"messages": None, "prompt": "P", "context": None}, "the value of 'messages' is null, "),
        ({"prompt": "P", "instruction": "I", "response": "R"}, "prompt and instruction mean the same"),
        ({"prompt": 3, "response": "R"}, "prompt must be text, not int"),
        ({"prompt": "P", "response": "\ud800"}, "response is not valid Unicode.*at character 0"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "not json"}, "not JSON"),
        ({"messages": "[" * 100000}, "not JSON"),
        ({"messages": {"role": "user"}}, "must be a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] must have the keys"),
        ({"messages": [*MESSAGES, {"role": "asistant", "content": "A"}]}, r"messages\[3\].*'asistant'.*did you mean 'assistant'"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\].content must be text, not NoneType"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}]}, "parts other than"),
    ],
)
def test_refusals_name_sample_and_key(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"(?s)sample 'id'.*{reason}"):
        turns(row)
