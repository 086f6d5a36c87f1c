"""Public FSDP2 setters: take a model's communication over, and give it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from primus_odc.fsdp.native import NativeAllGather, NativeReduceScatter
from primus_odc.fsdp.probe import Unit

_ALL_REDUCE_SETTERS = ("set_requires_gradient_sync", "set_requires_all_reduce")
"""FSDP2's setters by which its all-reduce over replicas is switched on."""


def take_over(
    modules: Sequence[FSDPModule],
    units: Sequence[Unit],
    gatherer: Callable[[int], Any],
    reducer: Callable[[int], Any],
    *,
    hsdp: bool,
    resident: bool,
) -> None:
    """Route every unit's communication through ``gatherer(unit)`` and ``reducer(unit)``; gradients are plain sums.

    ``modules[0]`` is the root. Under HSDP FSDP2 keeps its hands off ``.grad`` and calls no all-reduce, whenever a script switches it on:
    in a backward pass it would hang where ranks have different counts. With ``resident`` it frees no parameter by itself.
    """
    for g, unit in enumerate(units):
        for module in unit.modules:
            module.set_custom_all_gather(gatherer(g))
            module.set_custom_reduce_scatter(reducer(g))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if hsdp:
        modules[0].set_requires_all_reduce(False)
        for module in modules:
            for name in _ALL_REDUCE_SETTERS:
                # On the object, before its class's: no hook runs between a script's call and every way into a backward pass.
                setattr(module, name, partial(_set_but_no_all_reduce, getattr(module, name), module))
    if resident:
        modules[0].set_reshard_after_forward(False)
        modules[0].set_reshard_after_backward(False)


def _set_but_no_all_reduce(setter: Callable[..., None], module: FSDPModule, /, *args: Any, **kwargs: Any) -> None:
    setter(*args, **kwargs)
    type(module).set_requires_all_reduce(module, False)


def restore_collectives(modules: Sequence[FSDPModule]) -> None:
    """Give every module all-gather and reduce-scatter back."""
    for module in modules:
        module.set_custom_all_gather(NativeAllGather())  # type: ignore[arg-type]  # duck-typed: the base class is private
        module.set_custom_reduce_scatter(NativeReduceScatter())  # type: ignore[arg-type]


def give_back(modules: Sequence[FSDPModule], *, hsdp: bool, resident: bool) -> None:
    """Undo :func:`take_over`: collectives, and FSDP2's default of taking the mean over all ranks."""
    restore_collectives(modules)
    for module in modules:
        # What FSDP2 begins with, in all tested versions. The number of ranks is not the same: under HSDP it makes FSDP2 ask for a reduction
        # that gloo does not have.
        module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        module.set_force_sum_reduction_for_comms(False)
    if hsdp:
        for module in modules:
            for name in _ALL_REDUCE_SETTERS:
                delattr(module, name)
        modules[0].set_requires_all_reduce(True)
    if resident:
        modules[0].set_reshard_after_forward(True)
        modules[0].set_reshard_after_backward(True)
