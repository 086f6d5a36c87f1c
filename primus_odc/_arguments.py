"""What several commands have in common on the command line: words that change keys of a YAML, types of options, checks of lists."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def repeated(option: str, names: Iterable[str]) -> list[str]:
    """One sentence where ``option`` names something more than once: what is measured of it would stand under one name."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [f"{option}: {name} stands there {count} times; name each once" for name, count in seen.items() if count > 1]


def take_overrides(parser: argparse.ArgumentParser) -> None:
    """Let the words that ``parser`` does not know change the keys of the experiment YAML that it takes."""
    parser.set_defaults(takes_overrides=True)
    parser.epilog = "Words after the YAML change its keys: --key value, key=value, block.key=value."


def positive(word: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: ``word`` is none.
    """
    return _whole(word, 1)


def seed(word: str) -> int:
    """A whole number of at least 0.

    Raises:
        ArgumentTypeError: ``word`` is none.
    """
    return _whole(word, 0)


def _whole(word: str, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}")
    return int(word)
