"""Gradients that FSDP2 writes where they are pulled from: in the sum's dtype always, narrower where a rank has one microbatch only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import primus_odc
from tests.fsdp.models import Tiny, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [[1, 1], [1, 3], [0, 1], [2, 1], [1, 0], [1, 1]]
POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def _backward(model: Tiny, step: int, index: int, counts: list[int], device: str) -> None:
    x, y = (t.to(device=device, dtype=torch.bfloat16) for t in microbatch(step, dist.get_rank(), index))
    loss_of(model, x, y, rows(step, counts)).backward()


def _expected(whole: Tiny, step: int, counts: list[int], device: str) -> dict[str, torch.Tensor]:
    """The sum in fp64, over all ranks, of the bf16 gradients of a whole bf16 model, microbatch by microbatch (collective)."""
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in whole.named_parameters()}
    for index in range(counts[dist.get_rank()]):
        model = copy.deepcopy(whole).to(device=device, dtype=torch.bfloat16)
        _backward(model, step, index, counts, device)
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad.cpu().double()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, total)
    return {name: torch.stack([t[name] for t in everyone]).sum(0) for name in total}


def gradients(rank: int, world_size: int, reduced_in: str, options: dict[str, Any], announced: bool, device: str = "cpu") -> dict[str, Any]:
    """Largest relative error in any minibatch of ``COUNTS``, and bytes of gradients this rank pulled in each."""
    whole = tiny_model()
    model = shard(tiny_model().to(device), mp_policy=POLICIES[reduced_in])
    engine = primus_odc.attach(model, **options)
    worst, pulled = 0.0, []
    for step, counts in enumerate(COUNTS):
        engine.begin_minibatch(counts[rank] if announced else None)
        for index in range(counts[rank]):
            _backward(model, step, index, counts, device)
        engine.settle()
        pulled.append(engine.stats()["bytes_reduced"])
        expected = _expected(whole, step, counts, device)
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype == torch.float32
            error = (full(p.grad).cpu().double() - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
            worst = max(worst, float(error))
        model.zero_grad()
    engine.detach()
    return {"worst": worst, "pulled": pulled}


def bytes_pulled(rank: int, reduced_in: str, announced: bool) -> list[int]:
    """In local mode on two ranks: the other's slice of every gradient, of two bytes an element where it has one microbatch."""
    padded = sum(-(-p.shape[0] // 2) * (p.numel() // p.shape[0]) for p in tiny_model().parameters())
    narrow = reduced_in == "bf16" and announced
    return [padded * (0 if counts[1 - rank] == 0 else 2 if narrow and counts[1 - rank] == 1 else 4) for counts in COUNTS]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("reduced_in", POLICIES)
@pytest.mark.parametrize(
    "options",
    [{"parameters": "reshard"}, {"parameters": "resident"}, {"verify": "reference"}, {"verify": "checksum"}, {"accumulate": "owner"}],
)
def test_gradients_are_the_sum_of_the_microbatches(options: dict[str, Any], reduced_in: str, announced: bool) -> None:
    for rank, found in enumerate(run_workers(gradients, 2, reduced_in, options, announced, timeout_s=55)):
        assert found["worst"] <= 1e-6
        if "parameters" in options:
            assert found["pulled"] == bytes_pulled(rank, reduced_in, announced)


class _UpToTheHead(nn.Module):
    """FSDP2's root where the loss is chunked: the head is called by the loss, chunk by chunk."""

    def __init__(self, inner: Tiny) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner.embed(x)
        for block in self.inner.blocks:
            hidden = block(hidden)
        return hidden


def a_head_reduced_chunk_by_chunk(rank: int, world_size: int) -> list[float]:
    """Errors of all gradients against fp64; those of bf16 are near 0.01, a chunk that is lost or counted twice is 0.3 and more."""
    counts, worst = [1, 1], []
    inner = tiny_model()
    for unit in (*inner.blocks, inner.head):
        fully_shard(unit, mp_policy=POLICIES["bf16"])
    root = _UpToTheHead(inner)
    fully_shard(root, mp_policy=POLICIES["bf16"])
    engine = primus_odc.attach(root, accumulate="local")
    for step in range(4):
        engine.begin_minibatch(1)
        x, y = (t.bfloat16() for t in microbatch(step, rank, 0))
        hidden = root(x)
        leaf = hidden.detach().requires_grad_()
        for part, target in zip(leaf.split(1), y.split(1), strict=True):
            (F.mse_loss(inner.head(part), target, reduction="sum") / rows(step, counts)).backward()
        hidden.backward(leaf.grad)
        engine.settle()
        worst.append(worst_relative_error(inner, reference_gradients(tiny_model(), step, counts)))
        root.zero_grad()
    engine.detach()
    return worst


def test_what_comes_behind_the_only_contribution_is_added() -> None:
    for errors in run_workers(a_head_reduced_chunk_by_chunk, 2, timeout_s=50):
        assert max(errors) <= 0.05, errors


def handed_out(rank: int, world_size: int) -> list[tuple[bool, bool, bool]]:
    """For every group (whether FSDP2 was given the memory that others pull from, whether the group is complete now, whether it is given
    it now), at the end of backward and of settle."""
    model = shard(tiny_model(), mp_policy=POLICIES["bf16"])
    engine = primus_odc.attach(model, accumulate="local")

    def given(group: int) -> bool:
        buffer = engine._plane.unsharded(group)
        place = engine._reducers[group].allocate((buffer.numel(),), dtype=torch.bfloat16, device=torch.device("cpu"))
        engine._reducers[group].reset()
        return place.data_ptr() == buffer.data_ptr()

    engine.begin_minibatch(1)
    before = [given(group) for group in range(4)]
    _backward(model, 0, 0, [1, 1], "cpu")
    found = [(was, declared, given(group)) for group, (was, declared) in enumerate(zip(before, engine._protocol.declared, strict=True))]
    engine.settle()
    found += [(True, True, given(group)) for group in range(4)]
    engine.detach()
    return found


def test_what_is_complete_is_never_written_over() -> None:
    """A reduction that comes too late is refused; until then it has not touched what others may be pulling."""
    for found in run_workers(handed_out, 2, timeout_s=50):
        assert found[0] == (True, False, False)  # the root: reduced, not declared before settle
        assert found[1:] == [(True, True, False)] * 7
