"""What the protocol asks for: the only things its generators yield (:mod:`primus_odc.primitives.protocol`)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

ReadWord = Callable[[int, str, int], int]
"""(rank, word, index) -> its present value."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``word[index]``, which ``rank`` writes, must reach ``at_least``; ``operation`` says why, for messages and for counting waited time.

    The word lies in the memory of ``home``; None: in that of its writer, where a rank of another node cannot read it. ``in_vain`` says
    why the wait can never end, or nothing, from words as they are now.
    """

    rank: int
    word: str
    index: int
    at_least: int
    operation: str
    home: int | None = None
    in_vain: Callable[[ReadWord], str] | None = None


@dataclass(frozen=True, slots=True)
class Do:
    """Run ``action`` now; it moves data, or gives a device stream the work, and neither waits for a peer nor touches words."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Store:
    """Write one of this rank's own words, after everything before it is visible: on a device, when the stream has got there."""

    word: str
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class Send:
    """Write into the memory of ``rank``, which is in another node: ``put`` moves data there (None: nothing to move), and ``word[index]``
    there becomes ``value`` no earlier than the data are visible (put-with-signal). This rank is the word's only writer, and what it sends
    to one rank under words of one name arrives in order."""

    rank: int
    word: str
    index: int
    value: int
    put: Callable[[], None] | None = None


Effect = Wait | Do | Store | Send
Steps = Generator[Effect, None, None]
