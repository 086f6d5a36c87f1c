from __future__ import annotations

import torch

from primus_odc.bench.data import heaviest_first, make_minibatch, make_samples
from primus_odc.bench.job import arm_spec
from primus_odc.bench.lengths import draw_lengths
from primus_odc.planning import CostModel, MinibatchPlan

TOKENS = CostModel.from_config("linear")
CPU = torch.device("cpu")


def plan(policy: str, lengths: tuple[int, ...], ranks: list[list[list[int]]]) -> MinibatchPlan:
    buckets = tuple(tuple(tuple(bucket) for bucket in rank) for rank in ranks)
    return MinibatchPlan(policy=policy, lengths=lengths, max_tokens=100, microbatches=buckets)  # type: ignore[arg-type]


def test_lengths_are_cut_to_the_cap_and_repeat_with_the_seed() -> None:
    drawn = draw_lengths("longalign-like", 500, 20000, 3)
    assert drawn == draw_lengths("longalign-like", 500, 20000, 3) != draw_lengths("longalign-like", 500, 20000, 4)
    assert max(drawn) == 20000 and min(drawn) >= 1000 and 0.1 < drawn.count(20000) / 500 < 0.5
    assert draw_lengths("longalign-like", 500, 10**6, 3, divisor=64) == [n // 64 for n in draw_lengths("longalign-like", 500, 10**6, 3)]
    assert draw_lengths("equal", 3, 100, 0) == [50, 50, 50]


def test_the_heaviest_rank_comes_first_where_ranks_run_alone() -> None:
    mixed = plan("lb_mini", (10, 60, 40, 41), [[[0]], [[1]], [[2], [3]]])
    assert heaviest_first(mixed, TOKENS).microbatches == (((2,), (3,)), ((0,),), ((1,),))


def test_the_rank_with_the_costliest_microbatch_comes_first_in_lockstep() -> None:
    mixed = plan("lb_micro", (30, 60, 40, 41, 5, 1), [[[0], [4]], [[5], [1]], [[2], [3]]])
    assert heaviest_first(mixed, TOKENS).microbatches == (((5,), (1,)), ((0,), (4,)), ((2,), (3,)))


def test_every_rank_gets_its_part_and_all_know_the_number_of_targets() -> None:
    samples = make_samples([30, 7, 21, 12, 3], 50, 0)
    for name in ("nccl_pad", "nccl_localsort", "nccl_zero2", "odc_nopad"):
        parts = [make_minibatch(samples, arm_spec(name), TOKENS, 32, 3, rank, CPU) for rank in range(3)]
        lengths = sorted(n for part in parts for mb in part.microbatches for n in mb.packed.lengths if n > 1)
        assert lengths == [3, 7, 12, 21, 30], name
        assert {part.target_tokens for part in parts} == {73 - 5}
        assert sum(mb.num_targets for part in parts for mb in part.microbatches) == 68


def test_a_rank_without_work_pads_only_where_it_has_to() -> None:
    samples = make_samples([9], 50, 0)
    assert [len(make_minibatch(samples, arm_spec("odc_nopad"), TOKENS, 32, 2, rank, CPU).microbatches) for rank in (0, 1)] == [1, 0]
    assert [len(make_minibatch(samples, arm_spec("nccl_zero2"), TOKENS, 32, 2, rank, CPU).microbatches) for rank in (0, 1)] == [1, 1]
