"""Other plans of the same minibatch, by which one sees what an assignment of samples to ranks and microbatches changes in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from primus_odc.planning.cost import CostModel
from primus_odc.planning.plan import MinibatchPlan, Policy
from primus_odc.planning.policies import plan_minibatch

STRETCH = 0.15


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
    were up to 15 % longer, each by a share of its own: valid, nearly as balanced, with other samples together.

    Raises:
        PlanError: as :func:`plan_minibatch`.
    """
    if assignment == 0:
        return plan_minibatch(policy, lengths, world_size, max_tokens, cost_model, sample_ids)
    share = np.random.default_rng([assignment, *lengths]).random(len(lengths))
    # Longer, so that what fits a microbatch fits it as it is; a sample as long as the cap cannot grow.
    stretched = [max(length, min(max_tokens, round(length * (1 + STRETCH * s)))) for length, s in zip(lengths, share, strict=True)]
    plan = plan_minibatch(policy, stretched, world_size, max_tokens, cost_model, sample_ids)
    return replace(plan, lengths=tuple(lengths))
