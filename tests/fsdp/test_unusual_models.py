"""Models and loops off the beaten track: heads in turn, units called twice, odd dtypes, no elements, passes that fail or are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import primus_odc
from primus_odc.errors import OdcError, UnsupportedModelError
from tests.fsdp.checks import failures, relative_error, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model, worst_relative_error
from tests.workers import run_workers

COUNTS = [3, 1]
MODES: tuple[dict[str, Any], ...] = ({"accumulate": "local", "parameters": "reshard"}, {"accumulate": "owner", "parameters": "resident"})
Pass = Callable[[Any, torch.Tensor, torch.Tensor, int], None]


def _pass(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> None:
    loss_of(model, x, y, total).backward()


def _seeded(kind: type[Tiny]) -> Tiny:
    torch.manual_seed(0)
    return kind()


def _own(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank()
    return [microbatch(step, rank, i) for i in range(COUNTS[rank])]


def _reference(make: Callable[[], Tiny], run: Pass, step: int) -> dict[str, torch.Tensor]:
    whole = make()
    for p in whole.parameters():
        if p.requires_grad:
            p.data = p.data.double()
    for rank, n in enumerate(COUNTS):
        for i in range(n):
            x, y = microbatch(step, rank, i)
            run(whole, x.double(), y.double(), rows(step, COUNTS))
    return {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in whole.named_parameters() if p.requires_grad}


def _matches(make: Callable[[], Tiny], run: Pass = _pass, sharded: Callable[[Tiny], Tiny] = shard, limit: float = 1e-6) -> None:
    """Two minibatches in two modes, the count announced, and the last microbatch announced."""
    for mode in MODES:
        model = sharded(make())
        dtype = next(model.parameters()).dtype
        engine = primus_odc.attach(model, **mode)
        for step, announced in ((0, True), (1, False)):
            model.zero_grad()
            own = _own(step)
            engine.begin_minibatch(len(own) if announced else None)
            for i, (x, y) in enumerate(own):
                if not announced and i == len(own) - 1:
                    engine.last_microbatch()
                run(model, x.to(dtype), y.to(dtype), rows(step, COUNTS))
            engine.settle()
            gradients = {k: full(p.grad) for k, p in model.named_parameters() if p.requires_grad and p.grad is not None}
            for name, expected in _reference(make, run, step).items():
                assert expected.numel() == 0 or relative_error(gradients[name], expected) <= limit, name
        engine.detach()


class _Trunk(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.other_head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def two_heads_in_turn_chunk_by_chunk() -> None:
    def run(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> None:
        hidden = model(x)
        leaf = hidden.detach().requires_grad_()
        for part, target in zip(leaf.split(1), y.split(1), strict=True):
            for head in (model.head, model.other_head):
                (F.mse_loss(head(part), target, reduction="sum") / total).backward()
        hidden.backward(leaf.grad)

    def sharded(model: Tiny) -> Tiny:
        fully_shard(model.head)
        fully_shard(model.other_head)  # type: ignore[arg-type]
        return shard(model)

    _matches(lambda: _seeded(_Trunk), run, sharded)


class _Twice(Tiny):
    recomputed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        y: torch.Tensor = self.head(x)
        return y


class _TwiceRecomputed(_Twice):
    recomputed = True


def units_called_twice() -> None:
    _matches(lambda: _seeded(_Twice))


def units_called_twice_and_recomputed() -> None:
    _matches(lambda: _seeded(_TwiceRecomputed))


class _Reentrant(Tiny):
    plain = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[: self.plain]:
            x = block(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        y: torch.Tensor = self.head(x)
        return y


class _SecondTimeReentrant(_Reentrant):
    plain = 3


def reentrant_recomputation() -> None:
    _matches(lambda: _seeded(_Reentrant))
    _matches(lambda: _seeded(_SecondTimeReentrant), limit=5e-6)


class _Quantised(Tiny):
    """Frozen bf16 and fp16 weights of odd size between trainable fp32 ones: the latter stand at addresses not divisible by 4."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
            block.table = nn.Parameter(torch.randn(3, 5).half(), requires_grad=False)
            block.last = nn.Linear(7, 7)

    @staticmethod
    def weight(block: Any) -> torch.Tensor:
        total: torch.Tensor = block.scale.double().sum() * block.table.double().sum()
        return total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            weight = self.weight(block).to(x.dtype)
            x = block(x) + block.last(torch.tanh(x) * weight * 0.01)
        y: torch.Tensor = self.head(x)
        return y


def frozen_weights_of_other_dtypes() -> None:
    def sharded(model: Tiny) -> Tiny:
        fully_shard(model)  # one unit, so that all dtypes share one flat shard
        return model

    _matches(lambda: _seeded(_Quantised), sharded=sharded)


class _Empty(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].no_rows = nn.Parameter(torch.zeros(0, 4))
        self.blocks[1].no_columns = nn.Parameter(torch.zeros(4, 0))


def parameters_without_elements() -> None:
    _matches(lambda: _seeded(_Empty))


def double_precision() -> None:
    _matches(lambda: tiny_model().double(), limit=1e-14)


def compiled_blocks() -> None:
    def sharded(model: Tiny) -> Tiny:
        shard(model)
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    _matches(tiny_model, sharded=sharded)


def explicit_prefetch() -> None:
    def sharded(model: Tiny) -> Tiny:
        shard(model)
        blocks: list[Any] = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        return model

    _matches(tiny_model, sharded=sharded)


def next_forward_before_the_last_backward() -> None:
    for mode in MODES:
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **mode)
        own = _own(0)
        engine.begin_minibatch(len(own))
        losses: list[torch.Tensor] = []
        for x, y in own:
            losses.append(loss_of(model, x, y, rows(0, COUNTS)))
            if len(losses) == 2:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
        engine.settle()
        assert worst_relative_error(model, reference_gradients(tiny_model(), 0, COUNTS)) <= 1e-6
        engine.detach()


def all_forwards_before_all_backwards() -> None:
    """Recomputed by reentrant checkpoints, whose first forward is one without gradients."""
    for mode in MODES:
        model = shard(_seeded(_Reentrant))
        engine = primus_odc.attach(model, **mode)
        own = _own(0)
        engine.begin_minibatch(len(own))
        for loss in [loss_of(model, x, y, rows(0, COUNTS)) for x, y in own]:
            loss.backward()
        engine.settle()
        assert worst_relative_error(model, reference_gradients(tiny_model(), 0, COUNTS)) <= 1e-6
        engine.detach()


def a_forward_without_backward() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    for step in range(2):
        model.zero_grad()
        own = _own(step)
        engine.begin_minibatch(len(own) + 1)
        for x, y in own:
            _pass(model, x, y, rows(step, COUNTS))
        model(own[0][0])  # its loss is left out
        engine.settle()
        assert worst_relative_error(model, reference_gradients(tiny_model(), step, COUNTS)) <= 1e-6
    engine.detach()


def evaluation_in_inference_mode() -> None:
    for mode in MODES:
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **mode)
        with torch.inference_mode():
            for _ in range(1 + dist.get_rank()):
                model(microbatch(0, 0, 0)[0])
        own = _own(0)
        engine.begin_minibatch(len(own))
        for x, y in own:
            _pass(model, x, y, rows(0, COUNTS))
            with torch.inference_mode():
                model(x)
        engine.settle()
        assert worst_relative_error(model, reference_gradients(tiny_model(), 0, COUNTS)) <= 1e-6
        engine.detach()


def attached_in_inference_mode() -> None:
    model = shard(tiny_model())
    x, y = microbatch(0, dist.get_rank(), 0)
    with torch.inference_mode(), pytest.raises(UnsupportedModelError, match="inference_mode"):
        primus_odc.attach(model)
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    loss_of(model, x, y, 1).backward()
    engine.settle()
    engine.detach()


def offloaded_parameters() -> None:
    model = shard(tiny_model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    engine = primus_odc.attach(model)  # on the CPU, offloading moves nothing
    engine.begin_minibatch(1)
    x, y = microbatch(0, dist.get_rank(), 0)
    loss_of(model, x, y, 1).backward()
    engine.settle()
    engine.detach()


def nothing_trainable() -> None:
    model = shard(tiny_model().requires_grad_(False))
    engine = primus_odc.attach(model)
    with torch.no_grad():
        model(microbatch(0, 0, 0)[0])
    engine.begin_minibatch(0)
    engine.settle()
    assert engine.grad_norm() == 0.0
    engine.detach()


def gradients_left_in_fsdp2_are_an_error() -> None:
    """They would be missing now and surface in the next minibatch."""
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    engine.begin_minibatch(1)
    _pass(model, *_own(0)[0], 1)
    dist.barrier()  # the first rank to refuse tells the others, which must have come as far
    with pytest.raises(OdcError, match="set_requires_gradient_sync"):
        engine.settle()


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError


class _Failing(Tiny):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _FailingBackward.apply(self.blocks[0](self.embed(x)))
        y: torch.Tensor = self.head(self.blocks[1](x))
        return y


def a_failed_backward_is_not_settled() -> None:
    model = shard(_seeded(_Failing))
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    with pytest.raises((MemoryError, OdcError)):  # the first rank that fails tells the others, wherever they are
        _pass(model, *_own(0)[0], 1)
    dist.barrier()
    with pytest.raises(OdcError, match="an exception was raised inside the backward pass of microbatch 1"):
        engine.settle()


def hooks_that_expect_gradients_in_backward_are_refused() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    dist.barrier()  # the first rank to refuse tells the others, which must have come as far
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(OdcError, match=r"head\.weight has a hook"):
        engine.begin_minibatch(1)


CHECKS = {
    f.__name__: f
    for f in (
        two_heads_in_turn_chunk_by_chunk,
        units_called_twice,
        units_called_twice_and_recomputed,
        reentrant_recomputation,
        frozen_weights_of_other_dtypes,
        parameters_without_elements,
        double_precision,
        compiled_blocks,
        explicit_prefetch,
        next_forward_before_the_last_backward,
        all_forwards_before_all_backwards,
        a_forward_without_backward,
        evaluation_in_inference_mode,
        attached_in_inference_mode,
        offloaded_parameters,
        nothing_trainable,
        gradients_left_in_fsdp2_are_an_error,
        a_failed_backward_is_not_settled,
        hooks_that_expect_gradients_in_backward_are_refused,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_unusual(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
