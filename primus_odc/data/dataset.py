"""Samples of a token cache, as training sees them: one split, and cut at the cap where that was asked for.

The cache always holds whole samples, so another cap or another split needs no new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from primus_odc.data.cache import TokenCache
from primus_odc.data.samples import Sample
from primus_odc.errors import DataError

_NAMED_IN_MESSAGE = 5


class TokenDataset:
    """A read-only sequence of samples over a memory-mapped cache.

    Args:
        cache: where the tokens are.
        rows: which samples of the cache, in which order; all of them by default.
        truncate_at: cut longer samples to their first ``truncate_at`` tokens; None keeps all whole.

    Raises:
        DataError: no row, or a cut below one token.
    """

    lengths: npt.NDArray[np.int64]
    """Tokens of each sample after the cut, int64 of shape [samples]."""
    target_counts: npt.NDArray[np.int64]
    """Targets of each sample after the cut, int64 of shape [samples]."""
    ids: tuple[str, ...]
    """Sample ids."""
    truncated: int
    """How many samples were cut."""
    fingerprint: str
    """Hash of what this dataset contains; a saved stream position belongs to it."""

    def __init__(self, cache: TokenCache, rows: Sequence[int] | None = None, truncate_at: int | None = None) -> None:
        if truncate_at is not None and truncate_at < 1:
            raise DataError(f"samples cannot be cut to {truncate_at} tokens")
        chosen = np.arange(len(cache.ids)) if rows is None else np.asarray(rows, dtype=np.int64)
        if chosen.size == 0:
            raise DataError(f"a dataset without any sample of {cache.path}")
        self._cache = cache
        self._starts = cache.offsets[:-1][chosen]
        whole = cache.offsets[1:][chosen] - self._starts
        self.lengths = whole if truncate_at is None else np.minimum(whole, truncate_at)
        self.target_counts = cache.target_counts[chosen]
        cut = np.flatnonzero(self.lengths < whole)
        for i in cut:
            self.target_counts[i] = self._target_mask(int(i)).sum()
        self.truncated = cut.size
        self.ids = tuple(cache.ids[row] for row in chosen)
        for array in (self.lengths, self.target_counts):
            array.setflags(write=False)
        digest = hashlib.sha256(f"{cache.key}:{truncate_at}:".encode())
        digest.update(chosen.astype("<i8").tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, 0 to ``len - 1``; its arrays are read-only views of the cache.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self._starts[index])
        tokens = self._cache.tokens[start : start + int(self.lengths[index])]
        return Sample(sample_id=self.ids[index], tokens=tokens, target_mask=self._target_mask(index))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def require_at_most(self, max_tokens: int) -> None:
        """Refuse a dataset in which a sample has more than ``max_tokens`` tokens.

        Raises:
            DataError: names the samples with their lengths, the cap, and the two ways out.
        """
        too_long = np.flatnonzero(self.lengths > max_tokens)
        if too_long.size:
            named = ", ".join(f"{self.ids[i]!r} ({self.lengths[i]} tokens)" for i in too_long[:_NAMED_IN_MESSAGE])
            more = f" and {too_long.size - _NAMED_IN_MESSAGE} more" if too_long.size > _NAMED_IN_MESSAGE else ""
            raise DataError(
                f"{too_long.size} of {len(self)} samples are longer than the cap of {max_tokens} tokens a microbatch: {named}{more}; "
                f"raise odc.max_tokens_per_microbatch (or seq_length) to at least {self.lengths.max()}, "
                "or cut them with odc.over_length: truncate"
            )

    def summary(self) -> str:
        """One line: samples, tokens, targets, the distribution of lengths, and what was cut or carries no target."""
        p50, p90, p99 = (int(p) for p in np.percentile(self.lengths, [50, 90, 99]))
        untaught = int((self.target_counts == 0).sum())
        return (
            f"{len(self)} samples, {self.lengths.sum()} tokens, {self.target_counts.sum()} targets; "
            f"tokens a sample: mean {self.lengths.mean():.0f}, p50 {p50}, p90 {p90}, p99 {p99}, max {self.lengths.max()}; "
            f"{self.truncated} truncated, {untaught} without a target"
        )

    def _target_mask(self, index: int) -> npt.NDArray[np.bool_]:
        start = int(self._starts[index])
        return self._cache.target_mask[start : start + int(self.lengths[index])]
