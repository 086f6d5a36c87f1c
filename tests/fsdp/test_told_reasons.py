"""What FSDP2 or the engine cannot do with a model is told by its cause, not by what goes wrong later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import primus_odc
from primus_odc.errors import OdcError, UnsupportedModelError
from primus_odc.fsdp.engine import Engine
from tests.fsdp.checks import Check, failures, relative_error, run_checks
from tests.fsdp.models import Tiny, full, loss_of, microbatch, shard, tiny_model
from tests.workers import run_workers


class _Filter(nn.Module):
    """A complex weight, as of a layer that works on frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=7)


def _filters(trainable: bool) -> Tiny:
    model = tiny_model()
    for i in range(3):
        model.blocks[i] = _Filter()
        model.blocks[i].filter.requires_grad_(trainable)
    return model


def complex_parameters_that_train() -> None:
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.filter is of torch\.complex64.*view_as_real"):
        primus_odc.attach(shard(_filters(trainable=True)))


def complex_parameters_that_do_not_are_served() -> None:
    model, whole = shard(_filters(trainable=False)), _filters(trainable=False)
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    loss_of(model, *microbatch(0, dist.get_rank(), 0), 1).backward()
    engine.settle()
    for rank in range(dist.get_world_size()):
        loss_of(whole, *microbatch(0, rank, 0), 1).backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None and relative_error(full(p.grad), q.grad) <= 1e-6, name
    engine.detach()


class _Narrow(torch.Tensor):
    """Gathers itself in bf16, by FSDP2's all-gather extension."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Narrow:
        made: _Narrow = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*tree_map_only(cls, lambda t: t.held, args), **tree_map_only(cls, lambda t: t.held, kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.held.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return (outputs[0].float(), ()) if out is None else out.copy_(outputs[0])


def an_all_gather_extension_of_the_model() -> None:
    model = Tiny(width=8)
    model.blocks[0].up = nn.Linear(8, 17, bias=False)
    model.blocks[0].up.weight = nn.Parameter(_Narrow(torch.randn(17, 8)))
    shard(model)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.up\.weight is a _Narrow with an all-gather extension of its own"):
        primus_odc.attach(model)


def a_wrapper_around_the_model() -> None:
    wrapper = torch.compile(shard(tiny_model()), backend="eager")
    assert isinstance(wrapper, nn.Module)
    with pytest.raises(UnsupportedModelError, match=r"not OptimizedModule: .* torch\.compile\(\)"):
        primus_odc.attach(wrapper)


def _another_dtype(change: Callable[[Tiny], object], call: Callable[[Engine], object]) -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    dist.barrier()  # an error on one rank must not end another's attach()
    change(model)
    with pytest.raises(OdcError, match=r"the dtype of 22 parameters changed after attach\(\), of \S+ \(torch.float32 is torch.bfloat16\)"):
        call(engine)


def another_dtype_by_conversion() -> None:
    _another_dtype(lambda model: model.to(torch.bfloat16), Engine.publish)


def another_dtype_before_the_first_minibatch() -> None:
    _another_dtype(lambda model: model.to(torch.bfloat16), Engine.begin_minibatch)


def another_dtype_by_loading() -> None:
    for call in (Engine.publish, Engine.begin_minibatch):
        _another_dtype(_load_another_dtype, call)


def _load_another_dtype(model: Tiny) -> None:
    model.load_state_dict(shard(tiny_model(1).bfloat16()).state_dict(), assign=True)


class _Twice(Tiny):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        y: torch.Tensor = self.head(x)
        return y


def reentrant_recomputation_of_a_unit_called_twice() -> None:
    """FSDP2 by itself trains on with wrong gradients."""
    model = shard(_Twice())
    engine = primus_odc.attach(model)
    engine.begin_minibatch(1)
    loss_of(model, *microbatch(0, dist.get_rank(), 0), 1).backward()
    dist.barrier()
    with pytest.raises(OdcError, match="take use_reentrant=False"):
        engine.settle()


CHECKS: dict[str, Check] = {
    f.__name__: f
    for f in (
        complex_parameters_that_train,
        complex_parameters_that_do_not_are_served,
        an_all_gather_extension_of_the_model,
        a_wrapper_around_the_model,
        another_dtype_by_conversion,
        another_dtype_before_the_first_minibatch,
        another_dtype_by_loading,
        reentrant_recomputation_of_a_unit_called_twice,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CHECKS)
def test_told_reasons(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
