"""T25: the planner on the inputs that break planners, up to 4,096 samples on 64 ranks.

Right: every sample exactly once, the cap kept, never worse than longest-first to the lightest rank, counts equal where collectives need it,
and the same plan in every process (hash compared).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.planning import POLICIES, CostModel, MinibatchPlan, Policy, plan_minibatch

CAP = 65536
RANKS = 64


def lengths_of(case: str) -> tuple[list[int], int]:
    """(lengths, ranks) of one named case."""
    generator = np.random.default_rng(25)
    lengths = {
        "equal": lambda: np.full(512, 7000),
        "equal, just over half the cap": lambda: np.full(300, CAP // 2 + 1),
        "one giant": lambda: np.r_[np.full(255, 500), CAP],
        "zipf": lambda: np.minimum(generator.zipf(1.3, 4096), CAP),
        "as many samples as ranks": lambda: generator.integers(1000, CAP, RANKS),
        "fewer samples than ranks": lambda: generator.integers(1000, CAP, 5),
        "duplicates": lambda: generator.choice([900, 17000, 33000], 500),
        "4096 on 64": lambda: np.clip(generator.lognormal(np.log(14000), 0.57, 4096), 1000, CAP),
        "one": lambda: np.array([1]),
    }[case]()
    return lengths.astype(int).tolist(), 1 if case == "one" else RANKS


CASES = [
    "equal",
    "equal, just over half the cap",
    "one giant",
    "zipf",
    "as many samples as ranks",
    "fewer samples than ranks",
    "duplicates",
    "4096 on 64",
    "one",
]


def longest_first_to_the_lightest(costs: list[float], ranks: int) -> float:
    """The reference, written independently: the cost of the costliest rank."""
    loads = [0.0] * ranks
    for cost in sorted(costs, reverse=True):
        loads[min(range(ranks), key=loads.__getitem__)] += cost
    return max(loads)


def check(plan: MinibatchPlan, lengths: list[int], ranks: int, cap: int, model: CostModel) -> None:
    buckets = list(chain.from_iterable(plan.microbatches))
    assert sorted(chain.from_iterable(buckets)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in bucket) for bucket in buckets) <= cap
    assert len(plan.counts) == ranks
    costs = model.sample_costs(lengths).tolist()
    if plan.policy != "lb_mini":
        assert len(set(plan.counts)) == 1
        return
    assert all(buckets)
    loads = [sum(costs[i] for bucket in rank for i in bucket) for rank in plan.microbatches]
    assert max(loads) <= longest_first_to_the_lightest(costs, ranks) * (1 + 1e-9)


@pytest.mark.parametrize("cost_model", ["linear", "attention"])
@pytest.mark.parametrize("case", CASES)
def test_named_cases(case: str, cost_model: str) -> None:
    model = CostModel.from_config(cost_model)
    lengths, ranks = lengths_of(case)
    for policy in POLICIES:
        check(plan_minibatch(policy, lengths, ranks, CAP, model), lengths, ranks, CAP, model)


def test_equal_lengths_are_spread_evenly() -> None:
    lengths, ranks = lengths_of("equal")
    for policy in POLICIES:
        plan = plan_minibatch(policy, lengths, ranks, CAP, CostModel.from_config("linear"))
        assert [sum(len(bucket) for bucket in rank) for rank in plan.microbatches] == [8] * ranks


def test_a_giant_gets_a_rank_of_its_own() -> None:
    lengths, ranks = lengths_of("one giant")
    plan = plan_minibatch("lb_mini", lengths, ranks, CAP, CostModel.from_config("attention"))
    assert plan.microbatches[0] == ((255,),)
    assert max(sum(len(bucket) for bucket in rank) for rank in plan.microbatches[1:]) == 5, "255 small ones on 63 ranks: 4 or 5"


@st.composite
def minibatches(draw: st.DrawFn) -> tuple[list[int], int, int]:
    cap = draw(st.integers(1, 200))
    shape = draw(st.sampled_from(["any", "few values", "one giant", "equal"]))
    count = draw(st.integers(1, 60))
    if shape == "any":
        lengths = draw(st.lists(st.integers(1, cap), min_size=count, max_size=count))
    elif shape == "few values":
        values = draw(st.lists(st.integers(1, cap), min_size=1, max_size=3))
        lengths = draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))
    elif shape == "one giant":
        lengths = [1] * (count - 1) + [cap]
    else:
        lengths = [draw(st.integers(1, cap))] * count
    return lengths, draw(st.one_of(st.integers(1, 10), st.just(count))), cap


@settings(max_examples=150)
@given(minibatches(), st.sampled_from(POLICIES), st.sampled_from(["linear", "attention", (300.0, 2.0)]))
def test_any_minibatch(minibatch: tuple[list[int], int, int], policy: Policy, cost_model: str | tuple[float, float]) -> None:
    lengths, ranks, cap = minibatch
    model = CostModel.from_config(cost_model)
    plan = plan_minibatch(policy, lengths, ranks, cap, model)
    check(plan, lengths, ranks, cap, model)
    assert plan_minibatch(policy, list(lengths), ranks, cap, model).digest() == plan.digest()


DIGESTS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_t25_planner import digests
print("\\n".join(digests()))
"""


def digests() -> list[str]:
    """One digest for each policy, cost model and a few of the cases."""
    return [
        plan_minibatch(policy, *lengths_of(case), CAP, replace(CostModel.from_config(cost_model), fixed=fixed)).digest()
        for case in ("zipf", "duplicates", "fewer samples than ranks", "equal")
        for policy in POLICIES
        for cost_model, fixed in (("linear", 0.0), ("linear", 3000.0), ("attention", 0.1))
    ]


def test_the_same_plan_in_another_process() -> None:
    own = digests()
    assert len(set(own)) >= 4 * len(POLICIES), "cases and policies differ"
    for seed in ("1", "4711"):
        other = subprocess.run(
            [sys.executable, "-c", DIGESTS, os.path.dirname(__file__)],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        )
        assert other.stdout.split() == own
