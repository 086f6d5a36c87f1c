"""What a check found, and how findings are printed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from primus_odc._words import counted

Severity = Literal["ok", "note", "problem"]
"""``problem``: a run cannot start, or cannot work. ``note``: worth knowing; a run may start."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
JSON_FORMAT = 1
_WIDTH = 140


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    """What was looked at, for example ``host name``."""

    severity: Severity
    found: str
    """What is the case."""

    setting: str = ""
    """What to set or do about it; empty where there is nothing to do, or where ``found`` says it."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures behind ``found``, for programs."""


def from_dict(item: Mapping[str, Any]) -> Finding:
    """A finding that was turned into a dict by :func:`dataclasses.asdict`."""
    return Finding(**item)


def unique(findings: Sequence[Finding]) -> list[Finding]:
    """``findings`` without the problems that an earlier one told in the same words."""
    first = {f.found: f for f in reversed(findings) if f.severity == "problem"}
    return [f for f in findings if f.severity != "problem" or first[f.found] is f]


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, a line or more for each, and a last line that counts them."""
    width = max((len(f.check) for f in findings), default=0)
    lines: list[str] = []
    for f in findings:
        head = f"{f.severity:<8} {f.check:<{width}}  "
        text = f.found + (f"\n-> {f.setting}" if f.setting else "")
        for part in text.splitlines():
            lines += textwrap.wrap(part, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
            head = " " * len(head)
    return "\n".join([*lines, _summary(findings)])


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """The findings as one JSON object: ``format``, ``ok`` (no problem), ``seconds`` and ``findings`` with the fields of Finding."""
    content = {
        "format": JSON_FORMAT,
        "ok": not any(f.severity == "problem" for f in findings),
        "seconds": round(seconds, 3),
        "findings": [asdict(f) for f in findings],
    }
    return json.dumps(content, indent=2)


def _summary(findings: Sequence[Finding]) -> str:
    counts = {severity: sum(f.severity == severity for f in findings) for severity in reversed(SEVERITIES)}
    return ", ".join(f"{count} ok" if severity == "ok" else counted(count, severity) for severity, count in counts.items())
