"""What every rank shows the others beside its data: its control words, its heartbeat among them, and why it failed.

Those of ranks of the own node lie in mapped memory. Of ranks of other nodes there is only what :mod:`primus_odc.symmetric.links` was told:
the last heartbeat, and the text of a failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch

from primus_odc.symmetric.arena import align
from primus_odc.symmetric.words import WordLayout, Words

ABORT_TEXT_BYTES = 1024
OWN_WORDS = {"heartbeat": 1, "abort": 1, "closed": 1, "mapped": 1}
"""The heap's own, at the head of every layout."""


class Board:
    """The blocks of the ranks of this node, and news of the others.

    Args:
        layout: of the words, :data:`OWN_WORDS` among them.
        blocks: the first :meth:`nbytes` bytes of the segment of every rank of this node, by rank.
        rank: this rank.
        far: the ranks of other nodes.
    """

    def __init__(self, layout: WordLayout, blocks: Mapping[int, torch.Tensor], rank: int, far: Iterable[int]) -> None:
        self.words = Words(layout, {r: block[: layout.nbytes].numpy().view("int64") for r, block in blocks.items()}, rank)
        self._texts = {r: block[align(layout.nbytes) :][:ABORT_TEXT_BYTES] for r, block in blocks.items()}
        self.rank = rank
        self._beats = itertools.count(1)
        self._far_beats = dict.fromkeys(far, 0)
        self._far_aborts: dict[int, str] = {}

    @staticmethod
    def nbytes(layout: WordLayout) -> int:
        """Bytes of a block: words and abort text."""
        return align(layout.nbytes) + align(ABORT_TEXT_BYTES)

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks of this node, ascending."""
        return tuple(sorted(self._texts))

    def beat(self) -> None:
        """Show a sign of life."""
        self.words.write("heartbeat", next(self._beats))

    def beat_of(self, rank: int) -> int:
        """The last heartbeat of any rank: a number that grows while it lives."""
        return self.words.read(rank, "heartbeat") if rank in self._texts else self._far_beats[rank]

    def abort(self, message: str) -> None:
        """Show that this rank failed; the first message stands."""
        if self.words.read(self.rank, "abort"):
            return
        data = message.encode()[: ABORT_TEXT_BYTES - 1].ljust(ABORT_TEXT_BYTES, b"\0")
        self._texts[self.rank].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.words.write("abort", 1)

    def aborted(self) -> dict[int, str]:
        """Rank -> text of all that failed."""
        return {r: self.abort_message(r) for r in self._texts if self.words.read(r, "abort")} | self._far_aborts

    def abort_message(self, rank: int) -> str:
        """Why ``rank`` failed; empty if it did not."""
        if rank not in self._texts:
            return self._far_aborts.get(rank, "")
        if not self.words.read(rank, "abort"):
            return ""
        return bytes(self._texts[rank].numpy()).rstrip(b"\0").decode(errors="replace") or "no message"

    def note(self, beats: Mapping[int, int], aborts: Mapping[int, str]) -> None:
        """What was told of ranks of another node."""
        self._far_beats |= beats
        self._far_aborts |= aborts
