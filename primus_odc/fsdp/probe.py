"""Learn FSDP2's communication units and their flat layout by watching it gather, once, at attach.

Which parameters travel together, in which order and in which dtype are FSDP2's private matters. The public ``unshard()`` tells all of
it: it calls the module's all-gather object, to which we give a recorder that fills the output with a known byte pattern; afterwards
the parameters that changed are the unit's members, and the pattern found in each says where in the flat shard it came from. Nothing
is communicated, ``reshard()`` drops the pattern again, and no assumption about an order is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_odc.errors import UnsupportedModelError
from primus_odc.fsdp.own import Placeholders, padded_shape
from primus_odc.primitives.spec import GroupSpec, ParamSpec

_PATTERN_CHUNK = 1 << 24  # bytes filled at a time, which bounds the temporary memory of the pattern


@dataclass(frozen=True)
class ParamSlot:
    """Where a parameter is registered: ``getattr(module, attribute)`` is the sharded or the unsharded one, as FSDP2 has it just now."""

    name: str
    module: nn.Module
    attribute: str

    def current(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self.module, self.attribute)
        return parameter

    def sharded(self) -> DTensor:
        """The sharded parameter; the owning group must be resharded."""
        parameter = self.current()
        if not isinstance(parameter, DTensor):
            raise UnsupportedModelError(f"parameter {self.name} is not sharded at the moment: reshard its module first")
        return parameter


@dataclass(frozen=True)
class Unit:
    """One FSDP2 communication unit: its modules, its parameters in flat order, and the unsharded tensors autograd will see; and which
    parameters may bring their own slice of a gather."""

    modules: tuple[FSDPModule, ...]
    slots: tuple[ParamSlot, ...]
    unsharded: tuple[nn.Parameter, ...]
    spec: GroupSpec
    extensible: tuple[bool, ...]

    def is_sharded(self) -> bool:
        """Whether the modules have the sharded parameters at the moment."""
        return isinstance(self.slots[0].current(), DTensor)

    def finish_unshard(self) -> None:
        """Wait for an ``unshard()`` that was begun; where none was it is done now."""
        handle = self.modules[0].unshard(async_op=True)
        assert handle is not None
        handle.wait()


class _Recorder:
    """An all-gather object (torch ``AllGather``, duck-typed) that gathers nothing and writes digit ``digit`` of each byte's index."""

    def __init__(self) -> None:
        self.digit = 0
        self.row_nbytes = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        row = output_tensor.view(group.size(), -1)[0].view(torch.uint8)
        self.row_nbytes = row.numel()
        for start in range(0, row.numel(), _PATTERN_CHUNK):
            stop = min(start + _PATTERN_CHUNK, row.numel())
            index = torch.arange(start, stop, dtype=torch.int64, device=row.device)
            row[start:stop] = (index >> (8 * self.digit) & 0xFF).to(torch.uint8)


def reshard(modules: Sequence[FSDPModule], units: Sequence[Unit]) -> None:
    """Reshard all ``modules``, also those whose last forward raised: FSDP2 takes it to be running still, and frees nothing in it that does
    not reshard after forward."""
    for module in modules:
        module.reshard()
    for unit in units:
        if not unit.is_sharded():
            for module in unit.modules:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
                module.set_reshard_after_forward(False, recurse=False)


def find_units(model: nn.Module, shards: int) -> list[Unit]:
    """All communication units of ``model``, parents before children; every FSDP2 module is left resharded.

    Must run before custom communication is set; sets the recorder on every module, which the caller replaces.

    Raises:
        UnsupportedModelError: inference mode is on, or a unit cannot be served.
    """
    if torch.is_inference_mode_enabled():  # gathered in it, FSDP2's parameters could never be trained again
        raise UnsupportedModelError("attach() inside torch.inference_mode(): call it outside; evaluation may use inference mode later")
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    slots = [
        ParamSlot(f"{prefix}.{attribute}" if prefix else attribute, m, attribute)
        for prefix, m in model.named_modules()
        for attribute, _ in m.named_parameters(recurse=False, remove_duplicate=False)
    ]
    units: dict[tuple[str, ...], Unit] = {}
    reshard(modules, ())
    placeholders = Placeholders({n: p for n, p in model.named_parameters() if isinstance(p, DTensor)} if shards > 1 else {}, shards)
    try:
        for module in modules:
            unit = _probe(module, slots, shards, placeholders)
            if unit is None:
                continue
            key = tuple(s.name for s in unit.slots)
            # fully_shard([a, b]) makes one unit of several modules
            units[key] = replace(units[key], modules=units[key].modules + unit.modules) if key in units else unit
    finally:
        placeholders.remove()
    return list(units.values())


def _probe(module: FSDPModule, slots: list[ParamSlot], shards: int, placeholders: Placeholders) -> Unit | None:
    recorder = _Recorder()
    try:
        # Duck-typed on purpose: torch's abstract base class lives in a private module.
        module.set_custom_all_gather(recorder)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnsupportedModelError(f"an FSDP2 module has several parameter groups, which is not supported on demand: {error}") from error
    before = {id(s): s.current() for s in slots}
    offsets: dict[str, int] = {}
    members: list[ParamSlot] = []
    unsharded: dict[str, nn.Parameter] = {}
    while True:
        placeholders.unshard(module)
        if recorder.row_nbytes == 0 and shards > 1:  # one begun before attach() was finished instead
            module.reshard()
            placeholders.unshard(module)
        # A parameter without elements has no place in the layout, and nothing to gather or reduce.
        members = [s for s in slots if s.current() is not before[id(s)] and s.current().numel()]
        for s in members:
            unsharded[s.name] = s.current()
            if recorder.row_nbytes:
                first = s.current().detach().reshape(-1)[:1].view(torch.uint8)[0]
                offsets[s.name] = offsets.get(s.name, 0) | int(first) << (8 * recorder.digit)
        module.reshard()
        recorder.digit += 1
        if recorder.row_nbytes >> (8 * recorder.digit) == 0:
            break
    members = _first_names(members, unsharded)
    if not members:
        return None
    if recorder.row_nbytes == 0 and shards > 1:
        raise UnsupportedModelError(f"FSDP2 unsharded {members[0].name} without calling its all-gather object")
    members.sort(key=lambda s: offsets.get(s.name, 0))
    spec = _spec(members, unsharded, offsets, recorder.row_nbytes, shards)
    extensible = tuple(s.name in placeholders.worked for s in members)
    return Unit((module,), tuple(members), tuple(unsharded[s.name] for s in members), spec, extensible)


def _first_names(members: list[ParamSlot], unsharded: dict[str, nn.Parameter]) -> list[ParamSlot]:
    """Keep one slot per parameter: a weight shared inside a unit is registered under several names."""
    seen: set[int] = set()
    kept = []
    for s in members:
        if id(unsharded[s.name]) not in seen:
            seen.add(id(unsharded[s.name]))
            kept.append(s)
    return kept


def _spec(members: list[ParamSlot], unsharded: dict[str, nn.Parameter], offsets: dict[str, int], row_nbytes: int, shards: int) -> GroupSpec:
    params: list[ParamSpec] = []
    shard_cursor = grad_cursor = 0
    for s in members:
        p, full = s.sharded(), unsharded[s.name]
        if isinstance(full, DTensor) or p.to_local().device != full.device:
            raise UnsupportedModelError(f"parameter {s.name}: tensor parallelism and CPU offload are not supported on demand")
        padded = math.prod(padded_shape(p, shards))
        if shards > 1 and offsets[s.name] != shard_cursor:
            raise UnsupportedModelError(
                f"parameter {s.name} stands at byte {offsets[s.name]} of its unit's flat shard, expected {shard_cursor}: this torch packs "
                "shards in a way the engine does not know"
            )
        params.append(
            ParamSpec(
                name=s.name,
                trainable=p.requires_grad,
                gather_dtype=full.dtype,
                padded_numel=padded,
                local_shape=tuple(p.to_local().shape),
                shard_offset=shard_cursor if shards > 1 else 0,
                grad_offset=grad_cursor,
            )
        )
        shard_cursor += padded * full.dtype.itemsize
        grad_cursor += padded if p.requires_grad else 0
    if shards > 1 and shard_cursor != row_nbytes:
        raise UnsupportedModelError(f"the unit of {members[0].name} gathers {row_nbytes} bytes a shard, expected {shard_cursor}")
    if found := [s for s, p in zip(members, params, strict=True) if p.trainable and s.sharded().is_complex()]:
        raise UnsupportedModelError(
            f"parameter {found[0].name} is of {found[0].sharded().dtype}, whose gradients are not served on demand: keep it as a real "
            "tensor (torch.view_as_real) and use torch.view_as_complex() in forward"
        )
    dtypes = {s.sharded().dtype for s, p in zip(members, params, strict=True) if p.trainable} or {torch.float32}
    if len(dtypes) > 1:
        raise UnsupportedModelError(f"the trainable parameters of the unit of {members[0].name} have several dtypes: {dtypes}")
    grad_dtype = dtypes.pop()
    return GroupSpec(
        name=_common_prefix([p.name for p in params]),
        params=tuple(params),
        shards=shards,
        shard_nbytes=shard_cursor if shards > 1 else 0,
        grad_numel=grad_cursor,
        grad_dtype=grad_dtype,
        sum_dtype=torch.promote_types(grad_dtype, torch.float32),
    )


def _common_prefix(names: list[str]) -> str:
    """``decoder.layers.3`` for its parameters, the first parameter's name where nothing is common (the root unit)."""
    parts = [n.split(".")[:-1] for n in names]
    common = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common) or names[0]
