"""Validation in lockstep: Primus evaluates with one fixed number of microbatches on every rank, over collectives or on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("primus_odc")


class EvaluationCycle:
    """An iterator over this rank's microbatches of one evaluation, again and again, so that every evaluation sees the same samples.

    Args:
        make: makes a microbatch of dataset indices.
        samples: size of the dataset; where an evaluation has more, it begins anew, which rank 0 warns of.
        per_evaluation: samples of one evaluation over all ranks, a multiple of ``micro_batch_size * ranks``.
    """

    def __init__(
        self, make: Callable[[Sequence[int]], Any], samples: int, per_evaluation: int, micro_batch_size: int, rank: int, ranks: int
    ) -> None:
        self._make, self._samples = make, samples
        self._micro_batch_size, self._rank, self._ranks = micro_batch_size, rank, ranks
        self._length = per_evaluation // (micro_batch_size * ranks)
        self._position = 0
        if rank == 0 and per_evaluation > samples:
            logger.warning(
                "an evaluation has eval_iters x global_batch_size = %d samples and there are %d to validate on: some count more than once "
                "in its loss; set a smaller eval_iters, or give more",
                per_evaluation,
                samples,
            )

    def __iter__(self) -> EvaluationCycle:
        return self

    def __next__(self) -> Any:
        first = (self._position * self._ranks + self._rank) * self._micro_batch_size
        self._position = (self._position + 1) % self._length
        return self._make([(first + i) % self._samples for i in range(self._micro_batch_size)])
