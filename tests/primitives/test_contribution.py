from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from primus_odc.primitives import reference
from primus_odc.primitives.contribution import Contribution, UnshardedSum, split_pieces
from primus_odc.primitives.spec import GroupSpec
from tests.primitives.groups import SHAPES, groups, make_contribution, make_group, subsets


@st.composite
def epochs(draw: st.DrawFn) -> tuple[GroupSpec, list[list[list[int]]], int]:
    group = draw(groups())
    plan = draw(st.lists(st.lists(subsets(group), max_size=4), min_size=1, max_size=3))
    return group, plan, draw(st.integers(0, 1000))


@given(epochs(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=80)
def test_unsharded_sum_over_epochs(case: tuple[GroupSpec, list[list[list[int]]], int], dtype: torch.dtype) -> None:
    group, plan, seed = case
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((group.shards, group.grad_numel), torch.nan)  # whatever an older epoch left must not show
    total = UnshardedSum(group, buffer)
    for epoch in plan:
        expected = torch.zeros_like(buffer)
        for params in epoch:
            contribution = make_contribution(group, params, generator, dtype, whole=False)
            total.add(contribution)
            cursor = 0
            for i in params:
                start, numel = group.params[i].grad_offset, group.params[i].padded_numel
                expected[:, start : start + numel] += contribution.rows[:, cursor : cursor + numel].float()
                cursor += numel
        assert total.complete() is None
        assert torch.equal(buffer, expected)
        buffer.add_(1e6)


@given(groups(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(), st.integers(0, 2))
@settings(max_examples=80)
def test_a_first_contribution_in_place(group: GroupSpec, dtype: torch.dtype, only: bool, others: int) -> None:
    """Written where it stays, narrow where it is announced as the only one; what comes in spite of that is added."""
    assume(group.grad_numel > 0)
    generator = torch.Generator().manual_seed(0)
    buffer = torch.full((group.shards, group.grad_numel), torch.nan)
    total = UnshardedSum(group, buffer)
    everything = [i for i, _ in group.trainable()]
    for _ in range(2):
        expected = torch.zeros_like(buffer)
        for number in range(1 + others):
            contribution = make_contribution(group, everything, generator, dtype, whole=True)
            place = total.place(dtype, only=only)
            assert (place is not None) == (number == 0 and (only or dtype == torch.float32))
            if place is not None:
                place.copy_(contribution.rows.reshape(-1))
                contribution = Contribution(place.view(group.shards, -1), contribution.params)
            expected += contribution.rows.float()
            total.add(contribution)
        narrow = total.complete()
        assert narrow == (dtype if only and not others and dtype != torch.float32 else None)
        found = buffer if narrow is None else buffer.view(-1).view(narrow)[: buffer.numel()].view_as(buffer).float()
        assert torch.equal(found, expected)


@st.composite
def pieces_cases(draw: st.DrawFn) -> tuple[GroupSpec, list[int], int, int]:
    group = draw(groups())
    return group, draw(subsets(group)), draw(st.integers(1, 40)), draw(st.integers(0, 1000))


@given(pieces_cases())
@settings(max_examples=80)
def test_pieces_carry_every_element_once_to_its_place(case: tuple[GroupSpec, list[int], int, int]) -> None:
    group, params, max_numel, seed = case
    contribution = make_contribution(group, params, torch.Generator().manual_seed(seed), torch.float32, whole=False)
    for owner in range(group.shards):
        received = torch.zeros(group.grad_numel)
        times = torch.zeros(group.grad_numel)
        for offset, piece in split_pieces(group, contribution, owner, max_numel):
            assert 0 < piece.numel() <= max_numel
            received[offset : offset + piece.numel()] += piece
            times[offset : offset + piece.numel()] += 1
        held = reference.unpack(group, Contribution(torch.ones_like(contribution.rows), contribution.params), torch.float32)[owner]
        assert torch.equal(times, held)
        assert torch.equal(received, reference.unpack(group, contribution, torch.float32)[owner])


def test_neighbours_travel_as_one_run() -> None:
    group = make_group("g", SHAPES, 2, 0)  # parameter 2 is frozen and takes no place among the gradients
    n = [p.padded_numel for p in group.params]
    everything = Contribution(torch.zeros(2, group.grad_numel), (0, 1, 3, 4))
    assert everything.runs(group) == [(0, 0, group.grad_numel)]
    gap = Contribution(torch.zeros(2, n[0] + n[3] + n[4]), (0, 3, 4))
    assert gap.runs(group) == [(0, 0, n[0]), (n[0] + n[1], n[0], n[3] + n[4])]
    assert Contribution(torch.zeros(2, 0), ()).runs(group) == []


def test_sums_are_taken_in_the_dtype_of_the_buffer() -> None:
    group = make_group("g", ((1, 1, True),), 1, 0)
    total = UnshardedSum(group, torch.zeros(1, 1))
    for _ in range(300):
        total.add(Contribution(torch.ones(1, 1, dtype=torch.bfloat16), (0,)))  # 256 + 1 is 256 in bfloat16
    assert total.buffer.item() == 300.0
