"""Lengths to measure with: like those of long documents, or all alike."""

from __future__ import annotations

from primus_odc.planning.lengths import named_distribution


def draw_lengths(kind: str, count: int, cap: int, seed: int, divisor: int = 1) -> list[int]:
    """``count`` lengths: of ``longalign-like``, divided by ``divisor`` and cut to ``cap``, or ``equal``, all half of ``cap``."""
    if kind == "equal":
        return [max(2, cap // 2)] * count
    distribution = named_distribution(f"longalign-like/{divisor}")
    assert distribution is not None
    return [min(int(length), cap) for length in distribution.sample(count, seed)]


def draw_minibatches(kind: str, samples: int, count: int, cap: int, seed: int, samples_per_rank: int, divisor: int = 1) -> list[list[int]]:
    """Lengths of ``count`` minibatches of ``samples`` samples over all ranks; :func:`draw_lengths` says what the rest means."""
    lengths = draw_lengths(kind, samples * count, cap, seed * 1000 + samples_per_rank, divisor)
    return [lengths[start : start + samples] for start in range(0, len(lengths), samples)]
