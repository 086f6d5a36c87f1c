"""Which samples each minibatch has: an endless, shuffled, resumable sequence of dataset indices.

Epoch e visits the samples in an order that depends on (seed, e) alone. The orders stand one behind the other, and minibatch k is the k-th
run of ``global_batch_size`` entries, across the border of two epochs too, so no sample is dropped or repeated. Nothing depends on the
number of ranks, and the position is one number, the samples consumed so far; that number and what it belongs to are the whole state.

The order sorts the samples by the raw 64-bit output of PCG64. Unlike ``Generator.permutation``, that output is the same in every NumPy
release, so a run can be resumed, and ranks agree, across them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from primus_odc.errors import DataError

IndexArray = npt.NDArray[np.int64]


class MinibatchStream:
    """The minibatches of a training run.

    Args:
        num_samples: size of the dataset, at least 1.
        global_batch_size: samples a minibatch over all ranks, at least 1; may exceed ``num_samples``.
        seed: of the shuffling, not negative.
        dataset_fingerprint: identity of the dataset (``TokenDataset.fingerprint``), so that a state of another one is refused.

    Raises:
        DataError: a size below 1 or a negative seed.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, dataset_fingerprint: str = "") -> None:
        if num_samples < 1 or global_batch_size < 1 or seed < 0:
            raise DataError(
                "a minibatch stream needs num_samples >= 1, global_batch_size >= 1 and seed >= 0, "
                f"not {num_samples}, {global_batch_size} and {seed}"
            )
        self._identity: dict[str, Any] = {
            "num_samples": num_samples,
            "global_batch_size": global_batch_size,
            "seed": seed,
            "dataset_fingerprint": dataset_fingerprint,
        }
        self._num_samples, self._batch, self._seed = num_samples, global_batch_size, seed
        self._consumed = 0

    @property
    def consumed_samples(self) -> int:
        """Samples given out since the beginning of training."""
        return self._consumed

    def next(self) -> IndexArray:
        """The dataset indices of the next minibatch, int64 of shape [global_batch_size]."""
        indices = self.minibatch_after(self._consumed)
        self._consumed += self._batch
        return indices

    def minibatch_after(self, consumed_samples: int) -> IndexArray:
        """The minibatch after ``consumed_samples`` samples; the stream does not move, so another thread may look ahead."""
        pieces: list[IndexArray] = []
        position, missing = consumed_samples, self._batch
        while missing:
            epoch, start = divmod(position, self._num_samples)
            piece = epoch_order(self._num_samples, self._seed, epoch)[start : start + missing]
            pieces.append(piece)
            position, missing = position + piece.size, missing - piece.size
        return np.concatenate(pieces)

    def fast_forward(self, consumed_samples: int) -> None:
        """Continue after ``consumed_samples`` samples, for a checkpoint that keeps only this number.

        Raises:
            DataError: a negative number.
        """
        if consumed_samples < 0:
            raise DataError(f"consumed_samples is {consumed_samples}; it cannot be negative")
        self._consumed = consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """The position and what it belongs to, as JSON values."""
        return {**self._identity, "consumed_samples": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: the state is incomplete or belongs to another dataset, batch size or seed; the stream stays as it was.
        """
        require_position(state, **self._identity)
        self.fast_forward(state["consumed_samples"])


_POSITION: dict[str, type] = {
    "num_samples": int,
    "global_batch_size": int,
    "seed": int,
    "dataset_fingerprint": str,
    "consumed_samples": int,
}


def require_position(state: Mapping[str, Any], **present: Any) -> None:
    """Refuse a saved position (:meth:`MinibatchStream.state_dict`) that is none, or of a run that differs in what is known of the present.

    Raises:
        DataError: what is missing, or differs from ``present``.
    """
    if wrong := [key for key, kind in _POSITION.items() if type(state.get(key)) is not kind]:
        raise DataError(f"the saved data position is damaged: {', '.join(wrong)} missing or of another kind")
    if other := [f"{key} was {state[key]!r}, is {value!r}" for key, value in present.items() if state[key] != value]:
        raise DataError(
            f"the saved data position belongs to another run: {'; '.join(other)}; "
            "resume with the same data, global_batch_size and seed, or start the data anew"
        )


@functools.lru_cache(maxsize=4)
def epoch_order(num_samples: int, seed: int, epoch: int) -> IndexArray:
    """The order of one epoch: a read-only permutation of 0 to ``num_samples - 1``, int64."""
    drawn = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    order = np.argsort(drawn, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
