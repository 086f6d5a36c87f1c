"""Checks of single configuration values against their declared type.

Values come from YAML, from an environment variable or from a command line, and the last two deliver numbers as text (``--odc.timeout_s
1e2`` arrives as ``'1e2'``): text that is a number counts as one. Every refusal says what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

# Values of the in-tree port and what replaces them: a nearest-name search that ends on one answers with its replacement.
_REPLACED_VALUES: dict[str, dict[str, str]] = {"transport": {"rocshmem": "mori"}, "cost_model": {"fit": "attention"}}


# Keys whose number may be 0.
FROM_ZERO = ("microbatch_cost",)
# From ten heartbeats, below which a rank whose host is busy looks like one that is stopped, to a week: waits of sockets are limited to
# 2**31 ms, 24 days.
RANGES = {"timeout_s": (1.0, 604800.0)}


class BadValueError(ValueError):
    """One value is wrong; the text continues a sentence that begins with the key."""


def describe(value: Any) -> str:
    """A value and its kind, in the words of YAML: ``the text 'a'``, ``the number 3``, ``true``, ``the list [1]``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, list | tuple):
        return f"the list {list(value)!r}"
    mapping = as_mapping(value)
    if mapping is not None:
        return f"the block {dict(mapping)!r}"
    return f"{value!r} ({type(value).__name__})"


def spell(value: Any) -> str:
    """A value as it is written in YAML: ``true``, ``null``, ``3``."""
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def as_mapping(value: Any) -> Mapping[Any, Any] | None:
    """The value as a mapping when it is one, or is the namespace Primus makes of one; else None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, SimpleNamespace):
        return vars(value)
    return None


def expand_home(path: str) -> Path:
    """``path`` with a home folder in place of ``~`` and ``~user``.

    Raises:
        BadValueError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadValueError(f"is {describe(path)}, and there is no such home folder: {error}") from None


def nearest(name: str, allowed: Sequence[str]) -> str:
    """The allowed name most similar to ``name``, case and dashes aside."""
    plain = name.lower().replace("-", "_").strip()
    return max(allowed, key=lambda candidate: difflib.SequenceMatcher(None, plain, candidate).ratio())


def likely(name: str, allowed: Sequence[str]) -> str | None:
    """The allowed name that ``name`` is most likely a misspelling of, case aside; None where nothing is near."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return by_lower[found[0]] if found else None


def parse_value(key: str, value: Any, hint: Any) -> Any:
    """Check ``value`` of ``key`` against the type hint of its field and return it in that type.

    Raises:
        BadValueError: the value has another type, is not among the choices or lies outside the range.
    """
    choices = _choices(hint)
    if choices:
        return _parse_choice(key, value, choices, pair_allowed=_accepts(hint, tuple))
    if _accepts(hint, float):
        if key in FROM_ZERO:
            return _at_least_0(value)
        if key in RANGES:
            return _within(value, *RANGES[key])
        return _positive(value, "a number above 0")
    if _accepts(hint, bool):
        return _parse_bool(value)
    if _accepts(hint, str):
        return _parse_name(value)
    return _positive_int(value)


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for member in get_args(hint) if get_origin(member) is Literal for choice in get_args(member))


def _accepts(hint: Any, kind: type) -> bool:
    return any((get_origin(member) or member) is kind for member in get_args(hint) or (hint,))


def _parse_choice(key: str, value: Any, choices: tuple[str, ...], *, pair_allowed: bool) -> str | tuple[float, float]:
    allowed = ", ".join(choices) + (" or [a, b]" if pair_allowed else "")
    if pair_allowed and isinstance(value, list | tuple):
        return _parse_pair(value)
    if value is False and "off" in choices:
        return "off"  # YAML 1.1 reads a bare `off` so
    if not isinstance(value, str):
        raise BadValueError(f"must be one of {allowed}, but {describe(value)} was given")
    if value in choices:
        return value
    replaced = _REPLACED_VALUES.get(key, {})
    meant = nearest(value, (*choices, *replaced))
    raise BadValueError(f"has no choice {value!r}, did you mean {replaced.get(meant, meant)!r}? allowed: {allowed}")


def _parse_pair(value: Sequence[Any]) -> tuple[float, float]:
    wanted = f"must be linear, attention or two numbers [a, b] of at least 0, not both 0, but {describe(value)} was given"
    numbers = [_number(item) for item in value]
    if len(numbers) != 2 or any(n is None or n < 0 for n in numbers):
        raise BadValueError(wanted)
    a, b = (float(n) for n in numbers if n is not None)
    if a == b == 0:
        raise BadValueError(wanted)
    return a, b


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise BadValueError(f"must be true or false, but {describe(value)} was given")


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadValueError(f"must be a name, but {describe(value)} was given")
    return value.strip()


def _at_least_0(value: Any) -> float:
    number = _number(value)
    if number is None or number < 0:
        raise BadValueError(f"must be a number of at least 0, but {describe(value)} was given")
    return float(number)


def _within(value: Any, least: float, most: float) -> float:
    number = _number(value)
    if number is None or not least <= number <= most:
        raise BadValueError(f"must be a number from {least:.0f} to {most:.0f}, but {describe(value)} was given")
    return float(number)


def _positive(value: Any, wanted: str) -> float:
    number = _number(value)
    if number is None or number <= 0:
        raise BadValueError(f"must be {wanted}, but {describe(value)} was given")
    return float(number)


def _positive_int(value: Any) -> int:
    number = _positive(value, "a whole number above 0")
    if number != int(number):
        raise BadValueError(f"must be a whole number above 0, but {describe(value)} was given")
    return int(number)


def _number(value: Any) -> float | None:
    """The finite number ``value`` is or spells; None when it is anything else (``true`` is no number)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
