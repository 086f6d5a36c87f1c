"""The reduce-scatter object of one communication unit, and the hooks that tell which parameters a reduction holds.

FSDP2 concatenates, per owner, the gradients of exactly those parameters that received one since the last reduction. Which ones these
are is learnt from ``register_post_accumulate_grad_hook`` on the unsharded parameters autograd works with, so a microbatch may use any
subset of a unit, on every torch of the tested range, without ``set_reduce_scatter_unused_params``.

What FSDP2 takes for the reduced result is a buffer of zeros nobody ever writes: its ``.grad`` views and, under HSDP, its partial sums
stay zero and harmless; the real gradient is delivered at settle.

A unit whose shard group has one rank is never reduced by FSDP2; there the hook takes the gradient from autograd directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from primus_odc.errors import ProtocolError
from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.spec import GroupSpec

if TYPE_CHECKING:
    from primus_odc.fsdp.engine import Engine
    from primus_odc.fsdp.probe import Unit


class Zeros:
    """What FSDP2 takes for reduced results, and nobody writes: for each dtype of gradients as many zeros as its largest unit needs.

    With ``partial`` (HSDP) FSDP2 adds results up and keeps the sum, also beyond :meth:`Engine.detach`, until it reduces by itself. Then it
    adds that to any size of result, and so does a later engine, as ``requires_grad`` may change between: it gets one zero.
    """

    def __init__(self, groups: Sequence[GroupSpec], device: torch.device, *, partial: bool) -> None:
        self._partial = partial
        sizes: dict[torch.dtype, int] = {}
        for group in groups:
            sizes[group.grad_dtype] = max(group.grad_numel, sizes.get(group.grad_dtype, 0))
        self._buffers = {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in sizes.items()}
        self._addresses = {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}

    def of(self, group: GroupSpec) -> torch.Tensor:
        """``[grad_numel]`` (``partial``: ``[1]``, of storage for as many) in the dtype of the group's ``.grad``."""
        return self._buffers[group.grad_dtype][: 1 if self._partial else group.grad_numel]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in these zeros; asked for every parameter of every reduction."""
        return tensor.untyped_storage().data_ptr() in self._addresses


class ScatterAccumulate:
    """Implements torch's ``ReduceScatter`` interface (``FSDPModule.set_custom_reduce_scatter``), duck-typed."""

    def __init__(self, engine: Engine, group: int, unit: Unit, zeros: Zeros) -> None:
        self._engine = engine
        self._group = group
        self._spec = unit.spec
        self._unsharded = unit.unsharded
        self._trainable = tuple(i for i, p in enumerate(unit.spec.params) if p.trainable)
        self._arrived: set[int] = set()
        self._expects_output = False
        self._zeros = zeros
        self.handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(i))
            for i, parameter in enumerate(unit.unsharded)
            if unit.spec.params[i].trainable
        ]

    def reset(self) -> None:
        """Forget a backward pass that did not finish; called when a minibatch begins."""
        self._arrived.clear()
        self._expects_output = False

    def require_reduced(self) -> None:
        """Refuse to settle while FSDP2 holds gradients it has not handed over; it would add them to the next minibatch.

        Raises:
            ProtocolError: naming the parameters.
        """
        if self._arrived:
            names = [self._spec.params[i].name for i in sorted(self._arrived)]
            raise ProtocolError(
                f"group {self._spec.name}: FSDP2 holds gradients of {names} that it has not reduced: a backward pass did not finish, "
                "set_requires_gradient_sync(False) was in force in this rank's last microbatch, or the unit is called twice in a "
                "microbatch and recomputed with use_reentrant=True, where FSDP2 by itself loses gradients too (take use_reentrant=False)"
            )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks for the flat input first and for the output second."""
        numel = prod(int(s) for s in size)
        if not self._expects_output:
            self._expects_output = True
            whole = numel == self._spec.shards * self._spec.grad_numel
            place = self._engine.place(self._group, dtype) if whole else None
            return torch.empty(numel, dtype=dtype, device=device) if place is None else place
        # In the parameters' dtype, not the reduction's, to which FSDP2 would have to cast them for every unit of every microbatch.
        return self._zeros.of(self._spec)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._expects_output = False
        params = tuple(i for i in self._trainable if i in self._arrived)
        self._arrived.clear()
        if input_tensor.numel() == self._spec.shards * self._spec.grad_numel:
            params = self._trainable  # also where the user has FSDP2 fill in zeros for unused parameters
        expected = self._spec.shards * sum(self._spec.params[i].padded_numel for i in params)
        if input_tensor.numel() != expected:
            changed = [p.name for p, now in zip(self._spec.params, self._unsharded, strict=True) if p.trainable != now.requires_grad]
            with self._engine._guard(f"reduction of group {self._spec.name}"):
                raise ProtocolError(
                    f"group {self._spec.name}: FSDP2 reduces {input_tensor.numel()} elements where the parameters with a gradient have "
                    f"{expected}; requires_grad changed after attach() for {changed}: detach() and attach() again"
                )
        self._engine.reduce(self._group, Contribution(input_tensor.view(self._spec.shards, -1), params))

    def _hook(self, index: int) -> Any:
        # The hook lives in the tensor, out of the garbage collector's sight: through ``self`` it would keep the engine for ever.
        if self._spec.shards > 1:
            arrived = self._arrived
            return lambda parameter: arrived.add(index)
        reference = weakref.ref(self)

        def take(parameter: nn.Parameter) -> None:
            reducer = reference()
            assert reducer is not None and parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            reducer._engine.reduce(reducer._group, Contribution(gradient.reshape(1, -1), (index,)))

        return take
