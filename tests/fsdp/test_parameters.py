"""Which parameters take part: frozen, unused, shared out unevenly, grouped, sharded on another dimension; and what autograd does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import primus_odc
from tests.fsdp.checks import failures, relative_error, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [3, 1]
Step = Callable[[Tiny, int, int], None]


def _backward(model: Tiny, step: int, index: int) -> None:
    x, y = microbatch(step, dist.get_rank(), index)
    loss_of(model, x, y, rows(step, COUNTS)).backward()


MODES: tuple[dict[str, Any], ...] = (
    {"accumulate": "local", "parameters": "reshard"},
    {"accumulate": "owner", "parameters": "resident"},
)


def _train(model: Tiny, backward: Step = _backward, *, count: int | None = None, steps: int = 2, **options: Any) -> Iterator[int]:
    """Settle ``steps`` minibatches, yielding after each; the parameters do not change."""
    engine = primus_odc.attach(model, **options)
    n = COUNTS[dist.get_rank()]
    for step in range(steps):
        engine.begin_minibatch(n if count is None else None)
        for i in range(n):
            if count is not None and i == n - 1 and count:
                engine.last_microbatch()
            backward(model, step, i)
        engine.settle()
        yield step
        model.zero_grad()
    engine.detach()


def _matches(model: Tiny, whole: nn.Module, backward: Step = _backward, limit: float = 1e-6, **options: Any) -> None:
    for mode in MODES:
        for step in _train(model, backward, **options, **mode):
            assert worst_relative_error(model, reference_gradients(whole, step, COUNTS)) <= limit


def _frozen(names: Callable[[str], bool]) -> None:
    whole, model = tiny_model(), tiny_model()
    for m in (whole, model):
        for name, p in m.named_parameters():
            p.requires_grad_(not names(name))
    _matches(shard(model), whole)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def frozen_parameters() -> None:
    _frozen(lambda name: "norm" in name or name.endswith("bias"))


def frozen_unit() -> None:
    _frozen(lambda name: name.startswith("blocks.1."))


def only_one_parameter_trains() -> None:
    _frozen(lambda name: name != "blocks.1.up.weight")


class _Branches(Tiny):
    """Every microbatch uses other parts: whole units, and single parameters inside a unit."""

    def forward(self, x: torch.Tensor, uses: tuple[int, ...] = (0, 1, 2), norm: bool = True) -> torch.Tensor:
        x = self.embed(x)
        for i in uses:
            block = self.blocks[i]
            x = block(x) if norm else block(x, norm)
        y: torch.Tensor = self.head(x)
        return y


class _PartialBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.extra = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor, norm: bool = True) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x)) if norm else self.extra(x)))
        return y


def _branches() -> _Branches:
    torch.manual_seed(0)
    model = _Branches()
    model.blocks = nn.ModuleList(_PartialBlock(7) for _ in range(3))
    return model


def different_microbatches_use_different_modules() -> None:
    choices = {(0, 0): ((0,), True), (0, 1): ((0, 2), False), (0, 2): ((2,), True), (1, 0): ((1,), False)}

    def backward(model: nn.Module, step: int, rank: int, index: int) -> None:
        x, y = microbatch(step, rank, index)
        uses, norm = choices[rank, index]
        p = next(model.parameters())
        (F.mse_loss(model(x.to(p.dtype), uses, norm), y.to(p.dtype), reduction="sum") / rows(step, COUNTS)).backward()

    model = shard(_branches())
    modes: tuple[dict[str, Any], ...] = (*MODES, {"verify": "reference"})
    for options in modes:
        for step in _train(model, lambda m, s, i: backward(m, s, dist.get_rank(), i), **options):
            whole = _branches().double()
            for r, n in enumerate(COUNTS):
                for i in range(n):
                    backward(whole, step, r, i)
            reference = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in whole.named_parameters()}
            assert worst_relative_error(model, reference) <= 1e-6


def a_module_one_rank_never_uses() -> None:
    def backward(model: nn.Module, step: int, rank: int, index: int) -> None:
        x, y = microbatch(step, rank, index)
        p = next(model.parameters())
        uses = (0, 2) if rank == 1 else (0, 1, 2)
        (F.mse_loss(model(x.to(p.dtype), uses), y.to(p.dtype), reduction="sum") / rows(step, COUNTS)).backward()

    model = shard(_branches())
    for step in _train(model, lambda m, s, i: backward(m, s, dist.get_rank(), i)):
        whole = _branches().double()
        for r, n in enumerate(COUNTS):
            for i in range(n):
                backward(whole, step, r, i)
        reference = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in whole.named_parameters()}
        assert worst_relative_error(model, reference) <= 1e-6
        extra = model.blocks[0].extra.weight.grad  # used by nobody: zeros, on every rank
        assert extra is not None and float(full(extra).abs().max()) == 0.0


def several_modules_in_one_unit() -> None:
    model = tiny_model()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model)
    _matches(model, tiny_model())


def everything_in_one_unit() -> None:
    model = tiny_model()
    fully_shard(model)
    _matches(model, tiny_model())


def sharded_on_the_second_dimension() -> None:
    def make() -> Tiny:
        torch.manual_seed(0)
        return Tiny(width=8)

    model = make()
    for module in (*model.blocks, model):
        fully_shard(module, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else Shard(0))
    _matches(model, make())


def a_weight_shared_inside_a_unit() -> None:
    def make() -> Tiny:
        model = tiny_model()
        model.blocks[2] = model.blocks[0]
        return model

    model = make()
    fully_shard(model)
    _matches(model, make())


def own_parameters_beside_children() -> None:
    """FSDP2 orders a unit's parameters children first, ``named_parameters`` parents first; equal values hide a mix-up."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(7))
            self.inner = nn.LayerNorm(7)
            self.last = nn.Parameter(torch.ones(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x * self.first) * self.last
            return y

    def make() -> Tiny:
        model = tiny_model()
        model.blocks[1] = Scaled()
        return model

    _matches(shard(make()), make())


def recomputation_around_the_unit() -> None:
    model = shard(tiny_model())

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.embed(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: torch.Tensor = model.head(x)
        return y

    model.forward = forward  # type: ignore[method-assign]
    _matches(model, tiny_model())


def recomputation_inside_the_unit() -> None:
    model = tiny_model()
    for i in range(3):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i])
    shard(model)
    for step in _train(model):
        for (name, p), (_, expected) in zip(model.named_parameters(), _named(reference_gradients(tiny_model(), step, COUNTS)), strict=True):
            assert p.grad is not None
            assert relative_error(full(p.grad), expected) <= 1e-6, name


def _named(reference: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return list(reference.items())


def mixed_precision_equals_stock() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    equal = [2, 2]

    def backward(model: nn.Module, index: int) -> None:
        x, y = microbatch(0, dist.get_rank(), index)
        loss_of(model, x.bfloat16(), y.bfloat16(), rows(0, equal)).backward()

    stock = shard(tiny_model(), mp_policy=policy)
    for i in range(2):
        backward(stock, i)
    for options in ({"accumulate": "local"}, {"accumulate": "owner"}):
        model = shard(tiny_model(), mp_policy=policy)
        engine = primus_odc.attach(model, **options)
        engine.begin_minibatch(2)
        for i in range(2):
            backward(model, i)
        engine.settle()
        for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.dtype == torch.float32
            assert relative_error(full(p.grad), 2 * full(q.grad)) <= 1e-6, name  # stock FSDP2 takes the mean over two ranks
        engine.detach()


def pure_bfloat16_sums_in_fp32() -> None:
    model = shard(tiny_model().bfloat16())
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    x, y = microbatch(0, dist.get_rank(), 0)
    loss_of(model, x.bfloat16(), y.bfloat16(), 1).backward()
    engine.settle()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    engine.detach()


def chunked_loss_with_the_head_as_its_own_unit() -> None:
    def backward(model: Tiny, step: int, index: int) -> None:
        x, y = microbatch(step, dist.get_rank(), index)
        hidden = model(x)
        leaf = hidden.detach().requires_grad_()
        for part, target in zip(leaf.split(1), y.split(1), strict=True):  # forward and backward of the head, chunk by chunk
            (F.mse_loss(model.head(part), target, reduction="sum") / rows(step, COUNTS)).backward()
        hidden.backward(leaf.grad)

    model = tiny_model()
    model.forward = lambda x: _hidden(model, x)  # type: ignore[method-assign]
    fully_shard(model.head)
    shard(model)
    _matches(model, tiny_model(), backward)


def _hidden(model: Tiny, x: torch.Tensor) -> torch.Tensor:
    x = model.embed(x)
    for block in model.blocks:
        x = block(x)
    return x


def two_forwards_before_one_backward() -> None:
    def backward(model: Tiny, step: int, index: int) -> None:
        x, y = microbatch(step, dist.get_rank(), index)
        total = rows(step, COUNTS)
        (loss_of(model, x, y, total) + loss_of(model, 2 * x, y, total)).backward()

    for announced in (0, 1):  # complete at settle; last_microbatch() said before the last one
        model = shard(tiny_model())
        for step in _train(model, backward, count=announced):
            whole = tiny_model().double()
            for r, n in enumerate(COUNTS):
                for i in range(n):
                    x, y = (t.double() for t in microbatch(step, r, i))
                    (loss_of(whole, x, y, rows(step, COUNTS)) + loss_of(whole, 2 * x, y, rows(step, COUNTS))).backward()
            reference = {k: p.grad for k, p in whole.named_parameters() if p.grad is not None}
            assert worst_relative_error(model, reference) <= 1e-6


def gradient_sync_switched_off_between() -> None:
    def backward(model: Tiny, step: int, index: int) -> None:
        model.set_requires_gradient_sync(index == COUNTS[dist.get_rank()] - 1)  # type: ignore[operator]
        _backward(model, step, index)

    _matches(shard(tiny_model()), tiny_model(), backward)


CHECKS = {
    f.__name__: f
    for f in (
        frozen_parameters,
        frozen_unit,
        only_one_parameter_trains,
        different_microbatches_use_different_modules,
        a_module_one_rank_never_uses,
        several_modules_in_one_unit,
        everything_in_one_unit,
        sharded_on_the_second_dimension,
        a_weight_shared_inside_a_unit,
        own_parameters_beside_children,
        recomputation_around_the_unit,
        recomputation_inside_the_unit,
        mixed_precision_equals_stock,
        pure_bfloat16_sums_in_fp32,
        chunked_loss_with_the_head_as_its_own_unit,
        two_forwards_before_one_backward,
        gradient_sync_switched_off_between,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_parameters(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
