"""Types of command-line options that several commands have, for argparse: a wrong word is told as what it should have been."""

from __future__ import annotations

import argparse


def positive(word: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: ``word`` is none.
    """
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def seed(word: str) -> int:
    """A whole number of at least 0.

    Raises:
        ArgumentTypeError: ``word`` is none.
    """
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 0")
    return int(word)
