"""Decide before a step which rank runs which samples in which microbatches, and predict what that costs. numpy only."""

from primus_odc.planning.background import PlanAhead
from primus_odc.planning.cost import CostModel
from primus_odc.planning.plan import POLICIES, MinibatchPlan, Policy
from primus_odc.planning.policies import plan_minibatch

__all__ = ["POLICIES", "CostModel", "MinibatchPlan", "PlanAhead", "Policy", "plan_minibatch"]
