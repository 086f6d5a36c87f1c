"""Plan one minibatch after one of four policies.

``lb_mini``
    Ranks are balanced over the whole minibatch; each packs its samples into its own number of microbatches, possibly none.
``lb_micro``
    All ranks run the same number of microbatches, the smallest that fits. Samples are spread over all ranks' microbatches by cost, and
    microbatches with the same position cost about the same, because under collectives all ranks wait for the costliest. (The smallest count
    is also the strongest opponent: one more microbatch leaves the costliest samples less company to be balanced with.)
``localsort``
    One sample per microbatch; samples are dealt out in turn and sorted by length within the rank.
``round_robin``
    Samples are dealt out in turn and packed in the order of arrival.

All but ``lb_mini`` give every rank the same count, by empty buckets where needed, so that collectives can run them. Everywhere a rank's
costliest microbatch comes last: the more backward is left after a parameter group's last gradient is ready, the more of its transfer is
hidden.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel
from primus_odc.planning.packing import fewest_possible, pack
from primus_odc.planning.partition import Parts, integer_costs, longest_first, lower_bound, partition
from primus_odc.planning.plan import POLICIES, MinibatchPlan, Policy
from primus_odc.planning.refine import refine

_SHOWN = 8
_CLOSE = 2e-3  # a plan this near to the bound is not worth the time of making another
_Buckets = list[Parts]  # [rank][microbatch] -> samples


def plan_minibatch(
    policy: Policy,
    lengths: Sequence[int],
    world_size: int,
    max_tokens: int,
    cost_model: CostModel,
    sample_ids: Sequence[str] | None = None,
) -> MinibatchPlan:
    """Plan one minibatch; the same arguments give the same plan on every rank and machine.

    Args:
        policy: ``lb_mini``, ``lb_micro``, ``localsort`` or ``round_robin``.
        lengths: tokens of every sample of the minibatch, all ranks' together.
        world_size: number of ranks that share it; there may be fewer samples.
        max_tokens: most tokens of one microbatch (``odc.max_tokens_per_microbatch``).
        cost_model: what is balanced.
        sample_ids: names of the samples for error messages; by default their positions.

    Raises:
        PlanError: samples longer than the cap (all of them are named), no sample, or an argument out of range.
    """
    tokens = [operator.index(length) for length in lengths]
    _check(policy, tokens, world_size, max_tokens, sample_ids)
    costs, (fixed, padding) = integer_costs(cost_model.sample_costs(tokens), cost_model.fixed, float(cost_model.sample_costs(1)))
    planner = _Planner(tokens, costs.tolist(), fixed, padding, world_size, max_tokens)
    ranks = _Planner.METHODS[policy](planner)
    return MinibatchPlan(
        policy=policy,
        lengths=tuple(tokens),
        max_tokens=max_tokens,
        microbatches=tuple(tuple(tuple(sorted(bucket)) for bucket in planner.ascending(buckets)) for buckets in ranks),
    )


def _check(policy: str, tokens: list[int], world_size: int, max_tokens: int, sample_ids: Sequence[str] | None) -> None:
    problems = []
    if policy not in POLICIES:
        problems.append(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
    if world_size < 1:
        problems.append(f"world_size is {world_size}; it must be at least 1")
    if not tokens:
        problems.append("the minibatch has no sample")
    if sample_ids is not None and len(sample_ids) != len(tokens):
        problems.append(f"{len(sample_ids)} sample ids for {len(tokens)} lengths")
        sample_ids = None
    names = [str(name) for name in sample_ids] if sample_ids is not None else [f"#{i}" for i in range(len(tokens))]
    if short := [f"{names[i]} ({length})" for i, length in enumerate(tokens) if length < 1]:
        problems.append(f"samples without a token: {_listed(short)}")
    if max_tokens < 1:
        problems.append(f"max_tokens_per_microbatch is {max_tokens}; it must be at least 1")
    elif long := [f"{names[i]} ({length} tokens)" for i, length in enumerate(tokens) if length > max_tokens]:
        many = f"{len(long)} samples are" if len(long) > 1 else "1 sample is"
        problems.append(
            f"{many} longer than the cap of {max_tokens} tokens per microbatch: {_listed(long)}. "
            f"Raise `max_tokens_per_microbatch` to at least {max(tokens)}, or set `over_length: truncate` to cut such samples at the cap"
        )
    if problems:
        raise PlanError("the minibatch cannot be planned:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


class _Planner:
    """One minibatch; every policy is a method that returns [rank][microbatch] -> samples."""

    def __init__(self, tokens: list[int], costs: list[int], fixed: int, padding: int, world_size: int, max_tokens: int) -> None:
        self.tokens, self.costs, self.fixed, self.padding = tokens, costs, fixed, padding
        self.world_size, self.max_tokens = world_size, max_tokens

    def cost(self, bucket: Sequence[int]) -> int:
        """Cost of one microbatch."""
        return self.fixed + (sum(self.costs[i] for i in bucket) if bucket else self.padding)

    def ascending(self, buckets: Parts) -> Parts:
        """The microbatches of one rank, empty ones first, the costliest last."""
        return sorted(buckets, key=lambda bucket: (len(bucket) > 0, self.cost(bucket), min(bucket, default=-1)))

    def slowest(self, ranks: _Buckets) -> int:
        """Cost of the costliest rank when nobody waits for another."""
        return max(sum(self.cost(bucket) for bucket in buckets) for buckets in ranks)

    def lb_mini(self) -> _Buckets:
        split = partition(self.costs, self.world_size)
        goal = lower_bound(self.costs, self.world_size)
        if self.fixed:
            least = sum(self.costs) + self.fixed * fewest_possible(self.tokens, self.max_tokens)
            goal = max(goal, -(-least // self.world_size))
            split = refine(
                split, self.costs, goal=goal, tokens=self.tokens, max_tokens=self.max_tokens, cost_per_max_tokens=self.fixed, share=4
            )
        best = min(self._mini_candidates(split, goal), key=self.slowest)
        # The rank with the costliest sample comes first, as in lb_micro, so that arms can be compared on the same device.
        return sorted(best, key=self._costliest_sample)

    def _costliest_sample(self, buckets: Parts) -> tuple[int, int]:
        return min(((-self.costs[i], i) for bucket in buckets for i in bucket), default=(0, len(self.costs)))

    def _mini_candidates(self, split: Parts, goal: int) -> Iterator[_Buckets]:
        """Plans to choose from: a balanced split can need more microbatches than others do, which costs where ``fixed`` is not small."""
        balanced = self._pack_ranks(split)
        slowest = self.slowest(balanced)
        yield balanced
        if self.fixed:
            plain = longest_first(self.costs, self.world_size)
            if max(self._least_cost(samples) for samples in plain) < slowest:
                yield self._pack_ranks(plain)
        if slowest > goal * (1 + _CLOSE):
            yield [[bucket for bucket in buckets if bucket] for buckets in self.lb_micro()]

    def _least_cost(self, samples: list[int]) -> int:
        """What a rank with these samples cannot get below, however it packs them."""
        count = fewest_possible([self.tokens[i] for i in samples], self.max_tokens)
        return sum(self.costs[i] for i in samples) + self.fixed * count

    def _pack_ranks(self, split: Parts) -> _Buckets:
        return [
            [
                [samples[i] for i in bucket]
                for bucket in pack(
                    [self.costs[i] for i in samples],
                    [self.tokens[i] for i in samples],
                    self.max_tokens,
                    thorough=False,
                    share=self.world_size,
                )
            ]
            for samples in split
        ]

    def lb_micro(self) -> _Buckets:
        buckets = self.ascending(pack(self.costs, self.tokens, self.max_tokens, multiple=self.world_size))
        ranks: _Buckets = [[] for _ in range(self.world_size)]
        loads = [0] * self.world_size
        # Neighbours in the order of cost share a position; from the costliest position down, the costliest goes to the lightest rank.
        for start in range(len(buckets) - self.world_size, -1, -self.world_size):
            lightest_first = sorted(range(self.world_size), key=lambda rank: (loads[rank], rank))
            for rank, bucket in zip(lightest_first, reversed(buckets[start : start + self.world_size]), strict=True):
                ranks[rank].append(bucket)
                loads[rank] += self.cost(bucket)
        return ranks

    def localsort(self) -> _Buckets:
        return self._pad([[[i] for i in range(rank, len(self.tokens), self.world_size)] for rank in range(self.world_size)])

    def round_robin(self) -> _Buckets:
        ranks: _Buckets = []
        for rank in range(self.world_size):
            buckets: Parts = []
            filled = self.max_tokens
            for i in range(rank, len(self.tokens), self.world_size):
                if filled + self.tokens[i] > self.max_tokens:
                    buckets.append([])
                    filled = 0
                buckets[-1].append(i)
                filled += self.tokens[i]
            ranks.append(buckets)
        return self._pad(ranks)

    @staticmethod
    def _pad(ranks: _Buckets) -> _Buckets:
        count = max(len(buckets) for buckets in ranks)
        return [[[] for _ in range(count - len(buckets))] + buckets for buckets in ranks]

    METHODS: ClassVar[dict[str, Callable[[_Planner], _Buckets]]] = {
        "lb_mini": lb_mini,
        "lb_micro": lb_micro,
        "localsort": localsort,
        "round_robin": round_robin,
    }
