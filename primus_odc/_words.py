"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 minibatch``, ``2 minibatches``, ``2 samples``: a number and a noun with a regular plural."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
