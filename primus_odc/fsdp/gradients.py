"""The persistent ``.grad`` of every parameter, and the norm and clipping over all of them at once.

All gradient shards of one dtype lie in one contiguous buffer, made at attach and kept: ``.grad`` are views of it. So a norm or a clip is
one operation over one tensor instead of hundreds over small ones, and an optimizer may capture the addresses. The buffer is never an
accumulator of the protocol; padding inside it is zero.

``.grad`` keeps its PyTorch meaning: what was not set to ``None`` (or zeroed) before a minibatch is added to.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from primus_odc.errors import ProtocolError, UnsupportedModelError
from primus_odc.fsdp.probe import Unit
from primus_odc.primitives.contribution import NARROW
from primus_odc.primitives.publisher import require_dtypes
from primus_odc.primitives.spec import cast_nbytes

_ROW = 4096
"""Elements whose norm is taken in one piece."""
_PART = 1 << 24
"""Elements that are scaled in one piece."""


class GradientStore:
    """Owns the gradient buffers of all units, in unit order. ``is_zeros`` knows what FSDP2 took for a reduced result
    (:mod:`primus_odc.fsdp.reduce`)."""

    def __init__(self, units: Sequence[Unit], is_zeros: Callable[[torch.Tensor], bool]) -> None:
        self._units = units
        self._is_zeros = is_zeros
        sizes: dict[torch.dtype, int] = {}
        starts: list[int] = []
        for u in units:
            starts.append(sizes.get(u.spec.grad_dtype, 0))
            sizes[u.spec.grad_dtype] = starts[-1] + u.spec.grad_numel
        self._device = units[0].slots[0].sharded().to_local().device
        self.flat = {dtype: torch.zeros(numel, dtype=dtype, device=self._device) for dtype, numel in sizes.items()}
        self._scratch = torch.empty(cast_nbytes([u.spec for u in units]), dtype=torch.uint8, device=self._device)
        self._groups = [self.flat[u.spec.grad_dtype][start : start + u.spec.grad_numel] for u, start in zip(units, starts, strict=True)]
        self._grads: list[dict[int, DTensor]] = [self._views(u, flat) for u, flat in zip(units, self._groups, strict=True)]
        self._sharded: list[dict[int, DTensor]] = [{} for _ in units]
        self._dtypes = [slot.sharded().dtype for u in units for slot in u.slots]
        self._inside = False
        self.handles: list[RemovableHandle] = [self._before_steps()]
        self._hook_ids: set[int] = set()
        for u, grads in zip(units, self._grads, strict=True):
            for i in grads:
                self._watch(u.slots[i].sharded())

    def _watch(self, parameter: DTensor) -> None:
        self.handles.append(parameter.register_post_accumulate_grad_hook(self._discard(self._is_zeros)))
        self._hook_ids.add(self.handles[-1].id)

    def _before_steps(self) -> RemovableHandle:
        # torch calls this before a step of any optimizer and keeps it, so it must not keep the store.
        mine = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if (store := mine()) is not None:
                store._require_no_step_of(optimizer)

        handle = register_optimizer_step_pre_hook(before)
        weakref.finalize(self, handle.remove).atexit = False
        return handle

    def _require_no_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._inside:
            return
        names = {id(p): self._units[g].spec.params[i].name for g, kept in enumerate(self._sharded) for i, p in kept.items()}
        for name in (names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names):
            raise ProtocolError(
                f"{type(optimizer).__name__}.step() inside a minibatch: .grad of its parameters ({name}, ...) is there after settle(). "
                "The step would leave this minibatch out, and zero_grad() then drop its sum: call settle() between backward and step()"
            )

    @staticmethod
    def _views(unit: Unit, flat: torch.Tensor) -> dict[int, DTensor]:
        views = {}
        for i, p in unit.spec.trainable():
            sharded = unit.slots[i].sharded()
            local = flat[p.grad_offset : p.grad_offset + p.local_numel].view(p.local_shape)
            views[i] = DTensor.from_local(
                local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
            )
        return views

    @staticmethod
    def _discard(is_zeros: Callable[[torch.Tensor], bool]):  # type: ignore[no-untyped-def]  # a hook of torch's
        # Not a method: the collector does not see what a parameter's hook holds, so one that held this store, and with its units the
        # model, would never be freed.
        def discard(parameter: nn.Parameter) -> None:
            # FSDP2 may have assigned a view of zeros; the gradient comes at settle. Autograd calls this too, for a backward of the user's
            # through the sharded parameters themselves (a penalty on weights): what that made is a gradient.
            assert isinstance(parameter.grad, DTensor)
            if is_zeros(parameter.grad.to_local()):
                parameter.grad = None

        return discard

    def adopt(self) -> None:
        """Take over gradients the user assigned: copy them into the buffers, so that the minibatch adds to them. From here to
        :meth:`hand_over` a step of an optimizer with these parameters is refused.

        Raises:
            ProtocolError: a parameter was cast, frozen or unfrozen since attach, or a gradient is not sharded as its parameter.
            UnsupportedModelError: a hook waits for a parameter's gradient in backward, where on demand there is none yet.
        """
        slots = [(p, u.slots[i].sharded()) for u in self._units for i, p in enumerate(u.spec.params)]
        if changed := [p.name for p, now in slots if now.requires_grad != p.trainable]:
            raise ProtocolError(f"requires_grad changed after attach() for {changed}: detach() and attach() again")
        require_dtypes((p.name, before, now.dtype) for (p, now), before in zip(slots, self._dtypes, strict=True))
        for u, grads, kept in zip(self._units, self._grads, self._sharded, strict=True):
            for i, grad in grads.items():
                kept[i] = parameter = u.slots[i].sharded()
                self._require_no_other_hook(u.spec.params[i].name, parameter)
                if not getattr(parameter, "_post_accumulate_grad_hooks", None):
                    self._watch(parameter)  # load_state_dict(assign=True) has put another parameter in its place
                if parameter.grad is not None and parameter.grad is not grad:
                    if not isinstance(parameter.grad, DTensor) or parameter.grad.placements != parameter.placements:
                        found = getattr(parameter.grad, "placements", "an ordinary tensor")
                        raise ProtocolError(
                            f"the gradient assigned to {u.spec.params[i].name} is {found} and its parameter {parameter.placements}: assign "
                            "a DTensor of the parameter's own device mesh and placements"
                        )
                    grad.to_local().copy_(parameter.grad.to_local())
                    parameter.grad = grad
        self._inside = True

    def require_unassigned(self, *groups: int) -> None:
        """Refuse ``.grad`` that the user assigned to parameters of ``groups`` since :meth:`adopt`: settle would put the minibatch's sum in
        its place.

        Raises:
            ProtocolError: naming the parameter.
        """
        for g in groups:
            for i, parameter in self._sharded[g].items():
                if parameter.grad is not None and parameter.grad is not self._grads[g][i]:
                    raise ProtocolError(
                        f"the gradient of {self._units[g].spec.params[i].name} was assigned inside a minibatch (or made by a backward "
                        "through the sharded parameter itself), where on demand it is not complete before settle(): do that before "
                        "begin_minibatch(), and the minibatch adds to it, or after settle()"
                    )

    def direct(self, group: int) -> torch.Tensor | None:
        """Where :meth:`deliver` will have the sum of ``group`` written and leave it as it is: ``[grad_numel]``; None: something is added to
        it or it is cast."""
        spec, flat = self._units[group].spec, self._groups[group]
        fresh = all(p.grad is None for p in self._sharded[group].values())
        return flat if fresh and flat.dtype == spec.sum_dtype else None

    def deliver(self, group: int, fill: Callable[[torch.Tensor], None]) -> None:
        """Make (or add to) what :meth:`hand_over` sets as ``.grad`` of every trainable parameter of ``group`` from its finished sum, which
        ``fill`` writes where it is told to: ``[grad_numel]`` in the group's ``sum_dtype``."""
        unit, flat = self._units[group], self._groups[group]
        parameters = self._sharded[group]  # of begin_minibatch: in backward the module may hold the unsharded ones
        fresh = all(p.grad is None for p in parameters.values())
        if fresh and flat.dtype == unit.spec.sum_dtype:
            fill(flat)
        elif fresh:
            flat.copy_(self._filled(group, fill))
        else:
            total = self._filled(group, fill)
            for i, p in parameters.items():
                spec = unit.spec.params[i]
                part = slice(spec.grad_offset, spec.grad_offset + spec.padded_numel)
                if p.grad is self._grads[group][i]:
                    flat[part].add_(total[part])
                else:
                    flat[part].copy_(total[part])

    def untouched(self) -> bool:
        """Whether no parameter has a ``.grad``: what is delivered then can be seen, zeroed or scaled by nobody before :meth:`hand_over`."""
        return all(p.grad is None for kept in self._sharded for p in kept.values())

    def hand_over(self) -> None:
        """Set ``.grad`` of every trainable parameter: all groups are delivered."""
        for kept, grads in zip(self._sharded, self._grads, strict=True):
            for i, parameter in kept.items():
                parameter.grad = grads[i]
        self._inside = False

    def _filled(self, group: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        spec = self._units[group].spec
        if spec.grad_dtype == spec.sum_dtype:  # gradients are added to what was not zeroed
            total = torch.empty(spec.grad_numel, dtype=spec.sum_dtype, device=self._device)
        else:
            total = self._scratch[: spec.grad_nbytes].view(spec.sum_dtype)
        fill(total)
        return total

    def local_power_sum(self, norm_type: float) -> torch.Tensor:
        """This rank's part of the global norm, 0-dim fp64 where the gradients are: ``sum |g|^p``, or ``max |g|`` for the infinity norm."""
        self._require_ours()
        parts = [part for f in self.flat.values() if f.numel() for part in _row_norms(f, norm_type)]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        rows = torch.cat(parts)
        return rows.max() if math.isinf(norm_type) else rows.pow(norm_type).sum()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by ``factor`` (0-dim), which was made from :meth:`local_power_sum`."""
        for flat in self.flat.values():
            if flat.dtype in NARROW:
                # One element, not 0-dim: the product is fp32's. In fp16 a factor of a loss scale's size would be zero.
                flat.mul_(factor.to(torch.float32).view(1))
                continue
            # On devices a factor of another dtype takes a slow path, and so does a number in device memory times one large tensor.
            torch._foreach_mul_(flat.split(_PART), factor.to(flat.dtype))

    def _require_no_other_hook(self, name: str, parameter: torch.Tensor) -> None:
        # A private attribute, present in all tested versions and read only: torch has no public way to ask.
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks and not self._hook_ids.issuperset(hooks):
            raise UnsupportedModelError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook (an optimizer step or a norm inside backward?): on "
                "demand its gradient is complete only after settle(), and the hook would see zeros. Remove it; do its work after settle()"
            )

    def _require_ours(self) -> None:
        for u, grads in zip(self._units, self._grads, strict=True):
            for i, grad in grads.items():
                if u.slots[i].current().grad is not grad:
                    raise ProtocolError(
                        f"the gradient of {u.spec.params[i].name} is not the one settle() delivered; take norms and clip between settle() "
                        "and zero_grad(), and do not assign .grad in between"
                    )


def _row_norms(flat: torch.Tensor, norm_type: float) -> list[torch.Tensor]:
    """fp64 norms of rows of 4096 elements and of the rest.

    On a CPU all arithmetic is fp64. On a device, where that is several times as slow, a row's norm is taken in the gradients' own dtype,
    by a tree of additions; what is added up afterwards is fp64.
    """
    dtype = torch.float64 if flat.device.type == "cpu" else None
    whole = flat.numel() // _ROW * _ROW
    rows = [flat[:whole].view(-1, _ROW), flat[whole:].view(1, -1)]
    return [torch.linalg.vector_norm(r, norm_type, dim=1, dtype=dtype).to(torch.float64) for r in rows if r.numel()]
