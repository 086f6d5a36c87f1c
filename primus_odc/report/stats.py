"""The few statistics every part of the report uses, so that the terminal, the JSON and the figures cannot disagree.

Times of single steps on a shared machine have a long upper tail, so the typical value is the median and the spread is the pair of
quartiles, never mean and standard deviation. Ratios of two arms are taken step by step (both arms ran the same minibatch at that step)
before anything is aggregated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LAST = 5
"""Steps over which the end of a loss curve is averaged."""


def median(values: Sequence[float]) -> float:
    """The median; the mean of the two middle values where their number is even."""
    return float(np.median(np.asarray(values, dtype=np.float64)))


def quartiles(values: Sequence[float]) -> list[float]:
    """``[q1, q3]``, linearly interpolated between order statistics."""
    first, third = np.percentile(np.asarray(values, dtype=np.float64), [25.0, 75.0])
    return [float(first), float(third)]


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float], steps: Sequence[int]) -> list[float]:
    """``numerator[s] / denominator[s]`` for every step ``s`` of ``steps``."""
    return [numerator[step] / denominator[step] for step in steps]


def relative_differences(values: Sequence[float | None], reference: Sequence[float | None]) -> list[float | None]:
    """``|values[s] - reference[s]| / |reference[s]|`` per step; None where either is missing (a skipped step).

    Where the reference is exactly zero the absolute difference stands in.
    """
    differences: list[float | None] = []
    for value, expected in zip(values, reference, strict=True):
        if value is None or expected is None:
            differences.append(None)
        else:
            differences.append(abs(value - expected) / (abs(expected) if expected != 0.0 else 1.0))
    return differences


def last_mean(values: Sequence[float | None], count: int = LAST) -> float | None:
    """Mean of the last ``count`` values that exist, or of all where there are fewer; None where none does."""
    present = [value for value in values if value is not None][-count:]
    return sum(present) / len(present) if present else None
