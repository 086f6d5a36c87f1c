"""Predict how long a step takes in each arm, from its plan and the cost model alone.

Communication itself is not modelled: the prediction is the time that computing and waiting for each other's computing take, in the unit
of the cost model. With collectives all ranks meet at every layer of every microbatch, so the i-th microbatch takes on every rank what it
takes on the costliest: the step is the sum over i of the maximum over ranks. On demand nobody waits before the settle: the step is the
maximum over ranks of the sum.

``nccl_zero2`` keeps parameters unsharded through the minibatch. Its ranks meet at the layers of the first forward (the only all-gather)
and of the last backward (the only reduce-scatter); in between each runs by itself, which is taken as: maximum of the first forwards +
maximum of what lies between + maximum of the last backwards. A rank without a microbatch runs a padding bucket, because it must take part
in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from primus_odc.planning.cost import CostModel
from primus_odc.planning.plan import MinibatchPlan, Policy

Arm = Literal["nccl_pad", "nccl_localsort", "nccl_zero2", "odc_pad", "odc_nopad"]
ARMS: tuple[Arm, ...] = get_args(Arm)

BASELINES: tuple[Arm, ...] = ("nccl_pad", "nccl_localsort")
"""Arms that speed-ups are stated over."""

ARM_POLICY: dict[Arm, Policy] = {
    "nccl_pad": "lb_micro",
    "nccl_localsort": "localsort",
    "nccl_zero2": "lb_mini",
    "odc_pad": "lb_micro",
    "odc_nopad": "lb_mini",
}
"""The plan that each arm runs."""

ARM_MEANING: dict[Arm, str] = {
    "nccl_pad": "collectives: all ranks meet at every layer of every microbatch, of which all have as many",
    "nccl_localsort": "the same, with one sample a microbatch, the samples of a rank sorted",
    "nccl_zero2": (
        "collectives that meet in the first forward and the last backward only: the slowest of each is waited for. In between a rank keeps "
        "the whole model's parameters and gradients, 6 bytes a parameter more (bf16, reduced in fp32; 8 in fp32)"
    ),
    "odc_pad": "on demand, with the plan of nccl_pad: ranks meet once, at the end",
    "odc_nopad": "on demand, each rank with its own number of microbatches, the plan of nccl_zero2; its memory is odc.memory_budget_gib's",
}
"""What each arm does and waits for, in a few words."""

FORWARD_SHARE = 1 / 3
"""Forward's part of a microbatch's cost; backward computes two products for each one of forward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepPrediction:
    """One minibatch in one arm."""

    step_cost: float
    """From the start of the step until the last rank has its gradients."""

    busy: npt.NDArray[np.float64]
    """[world_size] cost of what each rank computes, padding buckets included."""

    @property
    def idle_fraction(self) -> npt.NDArray[np.float64]:
        """[world_size] part of the step that each rank waits."""
        return 1.0 - self.busy / self.step_cost


def predict_step(arm: Arm, plan: MinibatchPlan, cost_model: CostModel) -> StepPrediction:
    """Predict one step; ``plan`` must be of the arm's policy (:data:`ARM_POLICY`)."""
    assert plan.policy == ARM_POLICY[arm], f"{arm} runs {ARM_POLICY[arm]}, not {plan.policy}"
    costs = plan.microbatch_costs(cost_model)
    if arm in ("nccl_pad", "nccl_localsort"):
        step_cost = float(np.stack(costs).max(axis=0).sum())
    elif arm == "nccl_zero2":
        padding = np.array([cost_model.microbatch_cost([])])
        costs = [rank if rank.size else padding for rank in costs]
        first = np.array([FORWARD_SHARE * rank[0] for rank in costs])
        last = np.array([(1 - FORWARD_SHARE) * rank[-1] for rank in costs])
        between = np.array([rank.sum() for rank in costs]) - first - last
        step_cost = float(first.max() + between.max() + last.max())
    else:
        step_cost = float(max(rank.sum() for rank in costs))
    return StepPrediction(step_cost=step_cost, busy=np.array([rank.sum() for rank in costs]))
