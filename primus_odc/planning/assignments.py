"""Other plans of the same minibatch, by which one sees what an assignment of samples to ranks and microbatches changes in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel
from primus_odc.planning.plan import MinibatchPlan, Policy
from primus_odc.planning.policies import plan_minibatch

STRETCH = 0.15
"""Largest share by which samples are taken to be longer."""
ATTEMPTS = 32
"""Plans made in search of one that differs from all before."""


def plan_assignment(
    assignment: int,
    policy: Policy,
    lengths: Sequence[int],
    world_size: int,
    max_tokens: int,
    cost_model: CostModel,
    sample_ids: Sequence[str] | None = None,
) -> MinibatchPlan:
    """Assignment 0 is :func:`plan_minibatch`; every other number gives, the same on all ranks, a plan that the policy would make if samples
    came in another order and were longer, each by a share of its own: valid, nearly as balanced, with other samples together. No two
    numbers give the same plan. Where shares up to 15 % find nothing new larger ones are tried, up to 60 %; then the same companions on
    other ranks or in another order.

    Raises:
        PlanError: as :func:`plan_minibatch`; or no further assignment of these samples was found: the message says how many there are.
    """
    found = [plan_minibatch(policy, lengths, world_size, max_tokens, cost_model, sample_ids)]
    together = {_companions(found[0])}
    generator = np.random.default_rng([len(lengths), *lengths])
    while len(found) <= assignment:  # from the first on, so that a number knows what the smaller ones are
        moved = None
        for attempt in range(ATTEMPTS):
            stretch = STRETCH * (1 + 3 * attempt / ATTEMPTS)
            # Samples in another order, because the policy takes equal ones in the order that they have. Longer, so that what fits a
            # microbatch fits it as it is; a sample as long as the cap cannot grow.
            order = generator.permutation(len(lengths)).tolist()
            stretched = [
                max(lengths[i], min(max_tokens, round(lengths[i] * (1 + stretch * share))))
                for i, share in zip(order, generator.random(len(lengths)), strict=True)
            ]
            ids = None if sample_ids is None else [sample_ids[i] for i in order]
            plan = _in_order(plan_minibatch(policy, stretched, world_size, max_tokens, cost_model, ids), order, lengths)
            if _companions(plan) not in together:
                break
            if moved is None and plan not in found:
                moved = plan
        else:
            if moved is None:
                fewer = f"ask for fewer (bench curves: --assignments {len(found)}), or " if len(found) > 1 else ""
                raise PlanError(
                    f"assignment {assignment} of {len(lengths)} samples to {world_size} ranks was asked for, and {policy} has no more than "
                    f"{len(found)} that differ: {fewer}take larger minibatches"
                )
            plan = moved
        found.append(plan)
        together.add(_companions(plan))
    return found[assignment]


def _in_order(plan: MinibatchPlan, order: Sequence[int], lengths: Sequence[int]) -> MinibatchPlan:
    """``plan`` of samples in the order ``order``, as one of the samples as they are."""
    microbatches = tuple(tuple(tuple(sorted(order[i] for i in bucket)) for bucket in rank) for rank in plan.microbatches)
    return replace(plan, lengths=tuple(lengths), microbatches=microbatches)


def _companions(plan: MinibatchPlan) -> frozenset[tuple[int, ...]]:
    """Which samples share a microbatch, whatever its rank and place: what rounding notices most."""
    return frozenset(bucket for rank in plan.microbatches for bucket in rank if bucket)
