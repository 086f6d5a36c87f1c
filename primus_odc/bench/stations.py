"""The models a benchmark trains, each with its optimizer and, on demand, its engine.

Arms share what they can: all stock arms one model, all on-demand arms with the same options another with its engine, which stays attached,
and ``ideal`` a replica. With ``--share-model`` stock and on-demand arms share a single model, for shapes that do not fit several times;
the engine is then attached and detached between visits, outside the measured time.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import primus_odc
from primus_odc.bench.job import ArmSpec, Job
from primus_odc.bench.optimizer import DTensorAdamW, LocalAdamW, make_adamw, optimizer_bytes
from primus_odc.bench.shapes import SHAPES
from primus_odc.config import parse_options
from primus_odc.fsdp.engine import Engine
from primus_odc.megatron.ideal import Replica, own_rows
from primus_odc.megatron.meter import Meter
from primus_odc.megatron.model import PackedGPT, build_gpt_without_weights, draw_weights
from primus_odc.megatron.on_demand import MeteredEngine
from primus_odc.megatron.optimizer import local
from primus_odc.megatron.sharding import mixed_precision, shard_gpt

Options = tuple[tuple[str, str], ...] | None


@dataclass
class Station:
    """A sharded model and what trains it."""

    model: PackedGPT
    optimizer: LocalAdamW | DTensorAdamW
    meter: Meter
    options: Options = None
    engine: Engine | None = None
    engine_bytes: int = 0
    """What the device had less after attaching than before: outside PyTorch's allocator, and allocated in it; 0 on a CPU."""

    def resting_bytes(self) -> int:
        """Memory that stays between steps: parameters, moments, and what the engine says it adds."""
        parameters = sum(local(parameter).nbytes for parameter in self.model.parameters())
        return parameters + self.optimizer.state_bytes() + (sum(self.engine.memory.values()) if self.engine is not None else 0)


class Stations:
    """Makes models when they are first needed; all ranks make the same calls."""

    def __init__(self, job: Job, mesh: DeviceMesh, device: torch.device) -> None:
        self._job = job
        self._mesh = mesh
        self._device = device
        self._shape = SHAPES[job.shape].with_layers(job.layers)
        self._stations: dict[Options, Station] = {}
        self._replica: Replica | None = None

    def station(self, arm: ArmSpec) -> Station:
        """The model of an arm, in the state in which ``fully_shard`` leaves it, with the arm's engine attached or with none."""
        key = None if self._job.share_model else arm.options
        station = self._stations.get(key)
        if station is None:
            station = self._stations[key] = self._make(on_demand=key is not None)
        self._equip(station, arm.options)
        return station

    def replica(self) -> Replica:
        """The model of ``ideal``."""
        if self._job.share_model:
            for station in self._stations.values():
                self._equip(station, None)  # its memory is needed
        if self._replica is None:
            params, rank, world_size = self._shape.params, dist.get_rank(), dist.get_world_size()
            model = build_gpt_without_weights(params, self._shape.vocab_size)
            if params["bf16"]:
                model.to(torch.bfloat16)
            draw_weights(model, self._device, self._job.seed)
            shards = [own_rows(parameter.detach(), rank, world_size).float() for parameter in model.parameters()]
            self._replica = Replica(
                model, shards, lambda parts: make_adamw(list(parts.parameters())), self._job.clip_grad, rank, world_size
            )
        return self._replica

    def replica_bytes(self) -> int:
        """As :meth:`Station.resting_bytes`."""
        replica = self.replica()
        parameters = [*replica.model.parameters(), *replica.shards.parameters()]
        return sum(parameter.nbytes for parameter in parameters) + optimizer_bytes(replica.optimizer)

    def close(self) -> None:
        """Detach every engine; every rank calls it."""
        for station in self._stations.values():
            self._equip(station, None)

    def _equip(self, station: Station, options: Options) -> None:
        """Give a model the engine with these options, or none."""
        if station.options == options:
            return
        if station.engine is not None:
            station.engine.detach()
            station.engine = None
            gc.collect()  # frees the arena
        as_sharded(station.model)
        if options is not None:
            self._attach(station, dict(options))
        station.options = options

    def _make(self, on_demand: bool) -> Station:
        params = self._shape.params
        model = build_gpt_without_weights(params, self._shape.vocab_size)
        shard_gpt(model, self._mesh, mixed_precision(params, on_demand=on_demand), separate_head=True)
        draw_weights(model, self._device, self._job.seed, dist.get_rank())
        parameters = list(model.parameters())
        graph = on_demand and self._job.optimizer == "graph"  # gradients have to lie in the same memory every step
        optimizer = DTensorAdamW(parameters) if self._job.optimizer == "dtensor" else LocalAdamW(parameters, graph=graph)
        return Station(model=model, optimizer=optimizer, meter=Meter())

    def _attach(self, station: Station, options: Mapping[str, Any]) -> None:
        every = {**options, **self._job.engine_options(), "deterministic": self._job.deterministic}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the arena lies outside of PyTorch's allocator
        before = self._unaccounted_bytes()
        if self._device.type == "cpu":
            station.engine = MeteredEngine(station.model, parse_options(every), station.meter)
        else:
            # Spans of the host say little about a device: its timeline comes from torch's profiler.
            station.engine = primus_odc.attach(station.model, **every)
        station.engine_bytes = self._unaccounted_bytes() - before

    def _unaccounted_bytes(self) -> int:
        """Memory of the device in use outside torch's caching allocator, plus what is allocated inside it."""
        if self._device.type == "cpu":
            return 0
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device) + torch.cuda.memory_allocated(self._device)


def as_sharded(model: PackedGPT) -> None:
    """Undo what an arm changed: blocks free their parameters after forward, root and head keep them until backward."""
    assert isinstance(model, FSDPModule) and isinstance(model.output_layer, FSDPModule)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.set_reshard_after_forward(True)
    for module in (model, model.output_layer):
        module.set_reshard_after_forward(False, recurse=False)
    reshard(model)


def keep_unsharded(model: PackedGPT) -> None:
    """For ``nccl_zero2``: parameters stay after forward; the caller says when they are freed after backward."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)


def reshard(model: nn.Module) -> None:
    """Free every unsharded parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
