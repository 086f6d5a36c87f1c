"""FSDP2 takes this rank's own slice of a unit from what it published, instead of casting its parameters anew for every gather.

FSDP2 casts every parameter shard to the compute dtype whenever it gathers: memory traffic beside compute, for bytes that stand in the
arena already. Its all-gather extension (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``) lets a local tensor bring its own input. FSDP2
looks for both on the tensor, whatever its class, so they are put there as attributes, and taken away when the minibatch settles: between
minibatches parameters are the user's, to be saved, copied and compared as ever.

* The first gather of a minibatch goes FSDP2's way, since what it casts is compared with what was published
  (:mod:`primus_odc.fsdp.edits`).
* FSDP2 refuses the extension in units that it reshards to a smaller group (``reshard_after_forward=int``). Such units are known by the
  smaller gather that comes before their first reduction; until that reduction nothing is put on any.
* FSDP2 makes room for what an extension says when a module first runs. So there has to be one then: placeholders, while the engine learns
  the units (:mod:`primus_odc.fsdp.probe`). A model that ran before ``attach()`` has no room, and is gathered as without this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from primus_odc.errors import ProtocolError, UnsupportedModelError

if TYPE_CHECKING:
    from primus_odc.fsdp.probe import ParamSlot, Unit

_ARGUMENTS = ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
Inputs = tuple[tuple[torch.Tensor], None]
"""What ``fsdp_pre_all_gather`` returns: one input in the shape of the padded shard, and nothing that is to be remembered."""


class _Before:
    """A ``fsdp_pre_all_gather``. FSDP2 asks for its signature at every call, which is found fastest as an attribute."""

    __signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in _ARGUMENTS])

    def __init__(self, inputs: Callable[[MixedPrecisionPolicy], Inputs]) -> None:
        self._inputs = inputs

    def __call__(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: MixedPrecisionPolicy) -> Inputs:
        return self._inputs(mp_policy)

    def __reduce__(self) -> NoReturn:
        raise ProtocolError("a parameter itself is saved or copied inside a minibatch: take model.state_dict(), or do it after settle()")


def _after(outputs: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
    """``fsdp_post_all_gather``: the only output is the parameter, of which ``out`` is a view already."""
    return (outputs[0], ()) if out is None else None


def _local(parameter: DTensor) -> Any:
    """The local tensor that FSDP2 has; ``to_local()`` may return a view of it."""
    (name, *_), _ = parameter.__tensor_flatten__()
    return getattr(parameter, name)


def _put(parameter: DTensor, before: _Before) -> torch.Tensor:
    """Put the extension on a parameter's local tensor, and return that."""
    local = _local(parameter)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, _after
    return local


def _take_away(local: Any) -> None:
    del local.fsdp_pre_all_gather, local.fsdp_post_all_gather


def padded_shape(parameter: DTensor, shards: int) -> list[int]:
    """Shape of a local shard with FSDP2's padding."""
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    shape = list(parameter.shape)
    shape[placement.dim] = -(-shape[placement.dim] // shards)
    return shape


class Placeholders:
    """Extensions that do what FSDP2 does without them, of zeros, from their making until :meth:`remove`. ``parameters``: by name.

    Attributes:
        worked: names of the parameters through whose extension FSDP2 has gathered.

    Raises:
        UnsupportedModelError: a parameter has an extension already, as for fp8, whose bytes the engine does not know.
    """

    def __init__(self, parameters: Mapping[str, DTensor], shards: int) -> None:
        for name, parameter in parameters.items():
            if hasattr(_local(parameter), "fsdp_pre_all_gather"):
                raise UnsupportedModelError(
                    f"parameter {name} is a {type(_local(parameter)).__name__} with an all-gather extension of its own "
                    "(fsdp_pre_all_gather, as for fp8), which is not supported on demand: keep it as an ordinary tensor"
                )
        self.worked: set[str] = set()
        self._asked: set[str] = set()
        self._locals = [_put(p, _Before(self._zeros_for(name, p, shards))) for name, p in parameters.items()]

    def _zeros_for(self, name: str, parameter: DTensor, shards: int) -> Callable[[MixedPrecisionPolicy], Inputs]:
        def zeros(mp_policy: MixedPrecisionPolicy) -> Inputs:
            cast = mp_policy.param_dtype is not None and parameter.dtype.is_floating_point
            dtype = mp_policy.param_dtype if cast else parameter.dtype
            made = torch.zeros(padded_shape(parameter, shards), dtype=dtype, device=parameter.device)
            self._asked.add(name)
            return (made,), None

        return zeros

    def unshard(self, module: FSDPModule) -> None:
        """``module.unshard()``, with the extensions where there is room for them.

        Where there is none FSDP2 misses an attribute of an object of its own, right after the first extension answered; or before, where it
        ends a gather that was begun without them. Whether it is there cannot be asked before: both are private.
        """
        self._asked.clear()
        try:
            module.unshard()
        except AttributeError as error:
            if not type(error.obj).__module__.startswith(FSDPModule.__module__):
                raise
            self.remove()
            module.unshard()
        else:
            self.worked |= self._asked

    def remove(self) -> None:
        """Parameters are as FSDP2 made them again."""
        for local in self._locals:
            _take_away(local)
        self._locals.clear()


def lack_room(units: Sequence[Unit]) -> bool:
    """Whether FSDP2 casts parameters that it has no room for an extension of."""
    return any(
        u.spec.shards > 1 and not extensible and slot.sharded().dtype != p.gather_dtype
        for u in units
        for p, slot, extensible in zip(u.spec.params, u.slots, u.extensible, strict=True)
    )


class OwnSlices:
    """Of one rank. ``published(g)``: uint8 ``[shard_nbytes]``, what it published of unit g."""

    def __init__(self, units: Sequence[Unit], published: Callable[[int], torch.Tensor]) -> None:
        self._units = units
        self._published = published
        self._regrouped: set[int] = set()
        self._reduced: set[int] = set()
        self._made: dict[int, list[tuple[ParamSlot, _Before]]] = {}
        self._used: dict[int, list[torch.Tensor]] = {}

    def gathered(self, group: int, *, whole: bool) -> None:
        """A gather of ``group`` in a minibatch reaches the engine; from the next one on FSDP2 takes the published slice. ``whole``: among
        all ranks of the shard group."""
        if not whole:
            self._regrouped.add(group)
        elif group in self._reduced and group not in self._used:
            if group not in self._made:  # the host has little time in a forward pass: once
                self._made[group] = self._make(self._units[group], self._published(group))
            self._used[group] = [_put(slot.sharded(), before) for slot, before in self._made[group]]

    def reduced(self, group: int) -> None:
        """``group`` was reduced: whatever gathers its backward needs have been seen."""
        if group not in self._regrouped:
            self._reduced.add(group)

    def forget(self) -> None:
        """Parameters are as FSDP2 made them again."""
        for tensors in self._used.values():
            for local in tensors:
                _take_away(local)
        self._used.clear()

    @staticmethod
    def _make(unit: Unit, shard: torch.Tensor) -> list[tuple[ParamSlot, _Before]]:
        made = []
        for p, slot, extensible in zip(unit.spec.params, unit.slots, unit.extensible, strict=True):
            parameter, itemsize = slot.sharded(), p.gather_dtype.itemsize
            # What FSDP2 does not cast it does not copy either; what stands behind a narrower dtype may have no address of its own dtype.
            if extensible and parameter.dtype != p.gather_dtype and p.shard_offset % itemsize == 0:
                slice_ = shard[p.shard_offset : p.shard_offset + p.padded_numel * itemsize].view(p.gather_dtype)
                inputs = ((slice_.view(padded_shape(parameter, unit.spec.shards)),), None)
                made.append((slot, _Before(lambda mp_policy, inputs=inputs: inputs)))  # type: ignore[misc]
        return made
