"""The plan of one minibatch: which rank runs which samples, in which microbatches."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel

Policy = Literal["lb_mini", "lb_micro", "localsort", "round_robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

Microbatch = tuple[int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class MinibatchPlan:
    """Every sample of one minibatch in exactly one microbatch of one rank. All ranks hold the whole plan, and compare its digest."""

    policy: Policy
    """How it was made."""

    lengths: tuple[int, ...]
    """Tokens of every sample, in the order of the minibatch."""

    max_tokens: int
    """No microbatch holds more tokens than this."""

    microbatches: tuple[tuple[Microbatch, ...], ...]
    """[rank][microbatch] -> indices into ``lengths``, ascending. The costliest microbatch of a rank is its last. An empty tuple is an empty
    bucket (one padding token, all labels masked); ``lb_mini`` has none."""

    def __post_init__(self) -> None:
        problems = []
        placed = list(chain.from_iterable(chain.from_iterable(self.microbatches)))
        inside = np.array([i for i in placed if 0 <= i < len(self.lengths)], dtype=np.int64)
        used = np.bincount(inside, minlength=len(self.lengths))
        if wrong := np.flatnonzero(used != 1).tolist():
            problems.append(f"{len(wrong)} samples are not in exactly one microbatch (first: sample {wrong[0]}, {used[wrong[0]]} times)")
        if outside := len(placed) - len(inside):
            problems.append(f"{outside} indices lie outside the minibatch of {len(self.lengths)} samples")
        for rank, buckets in enumerate(self.microbatches if not problems else ()):
            for position, bucket in enumerate(buckets):
                tokens = sum(self.lengths[i] for i in bucket)
                if tokens > self.max_tokens:
                    problems.append(f"microbatch {position} of rank {rank} holds {tokens} tokens, more than the cap of {self.max_tokens}")
        if problems:
            raise PlanError(f"the {self.policy} plan is not valid: " + "; ".join(problems))

    @property
    def world_size(self) -> int:
        """Number of ranks, those without a microbatch included."""
        return len(self.microbatches)

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches of every rank, empty buckets included."""
        return tuple(len(buckets) for buckets in self.microbatches)

    def microbatch_costs(self, cost_model: CostModel) -> list[npt.NDArray[np.float64]]:
        """Cost of every microbatch: one array [count of the rank] per rank."""
        samples = cost_model.sample_costs(self.lengths).tolist()
        padding = float(cost_model.sample_costs(1))

        def cost(bucket: Microbatch) -> float:
            return cost_model.fixed + (math.fsum(samples[i] for i in bucket) if bucket else padding)

        return [np.array([cost(bucket) for bucket in buckets], dtype=np.float64) for buckets in self.microbatches]

    def rank_costs(self, cost_model: CostModel) -> npt.NDArray[np.float64]:
        """Cost of all microbatches of every rank, [world_size]."""
        return np.array([costs.sum() for costs in self.microbatch_costs(cost_model)])

    def digest(self) -> str:
        """sha256 (hex) of policy, lengths, cap and microbatches: equal on two ranks exactly if they hold the same plan."""
        canonical = [self.policy, self.lengths, self.max_tokens, self.microbatches]
        return hashlib.sha256(json.dumps(canonical, separators=(",", ":")).encode()).hexdigest()
