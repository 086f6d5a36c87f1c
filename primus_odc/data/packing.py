"""Lay the samples of a microbatch end to end, without padding.

Attention stays inside a sample (``cu_seqlens``) and positions start at 0 in each, so what a sample is packed with changes nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from primus_odc.data.samples import Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedMicrobatch:
    """What one forward pass reads. T is the number of tokens of all samples together, n the number of samples."""

    tokens: npt.NDArray[np.int64]
    """Token ids, int64 of shape [T]."""
    labels: npt.NDArray[np.int64]
    """The next token of the same sample, int64 of shape [T]; 0 at each sample's last position."""
    loss_mask: npt.NDArray[np.float32]
    """1.0 where the label is a target, float32 of shape [T]; 0.0 at each sample's last position. Its sum is the target count."""
    position_ids: npt.NDArray[np.int64]
    """Position within the sample, int64 of shape [T]."""
    cu_seqlens: npt.NDArray[np.int32]
    """Sample i is at ``cu_seqlens[i]:cu_seqlens[i + 1]``; int32 of shape [n + 1]."""


def pack_microbatch(samples: Sequence[Sample]) -> PackedMicrobatch:
    """Pack ``samples`` in their order; no sample gives the empty bucket, one token 0 that counts nowhere."""
    if not samples:
        nothing = np.zeros(1, dtype=np.int64)
        return PackedMicrobatch(
            tokens=nothing,
            labels=nothing.copy(),
            loss_mask=np.zeros(1, dtype=np.float32),
            position_ids=nothing.copy(),
            cu_seqlens=np.array([0, 1], dtype=np.int32),
        )
    cu_seqlens = np.cumsum([0] + [sample.tokens.size for sample in samples]).astype(np.int32)
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    targets = np.concatenate([sample.target_mask for sample in samples])
    last = cu_seqlens[1:] - 1
    labels, loss_mask = np.roll(tokens, -1), np.roll(targets, -1).astype(np.float32)
    labels[last], loss_mask[last] = 0, 0.0
    position_ids = np.concatenate([np.arange(sample.tokens.size, dtype=np.int64) for sample in samples])
    return PackedMicrobatch(tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
