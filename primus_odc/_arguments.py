"""Types of command-line options that several commands have, for argparse: a wrong word is told as what it should have been."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def repeated(option: str, names: Iterable[str]) -> list[str]:
    """One sentence where ``option`` names something more than once: what is measured of it would stand under one name."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [f"{option}: {name} stands there {count} times; name each once" for name, count in seen.items() if count > 1]


def positive(word: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: ``word`` is none.
    """
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)
