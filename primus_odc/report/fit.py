"""What a microbatch takes to compute, as a function of the lengths of its samples.

Fitted to the microbatches of ``ideal``, which neither communicates nor waits, it says what a rank of another arm computed in a step in
which transfers and waiting cannot be told from computing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bucket = Sequence[int]
"""Lengths of a microbatch's samples, in tokens; empty: padding."""


def fit_times(pairs: Sequence[tuple[Bucket, float]]) -> tuple[npt.NDArray[np.float64], list[float]]:
    """Coefficients for :func:`predict_ms`, and the relative error of each pair.

    Args:
        pairs: at least one, (microbatch, milliseconds above 0).
    """
    matrix, times = np.array([_features(bucket) for bucket, _ in pairs]), np.array([ms for _, ms in pairs])
    # Relative residuals: short microbatches count as much as long ones. The scaling keeps the columns comparable.
    scale = np.abs(matrix).max(axis=0)
    weights = 1.0 / times
    solution = np.linalg.lstsq(matrix / scale * weights[:, None], times * weights, rcond=None)[0] / scale
    return solution, np.abs(matrix @ solution / times - 1.0).tolist()


def predict_ms(coefficients: npt.NDArray[np.float64], bucket: Bucket) -> float:
    """Milliseconds of a microbatch."""
    return float(np.dot(_features(bucket), coefficients))


def _features(bucket: Bucket) -> list[float]:
    lengths = bucket or [1]  # a padding microbatch
    return [float(sum(lengths)), float(sum(length * length for length in lengths)), 1.0]
