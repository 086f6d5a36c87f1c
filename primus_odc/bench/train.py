"""One rank of ``primus-odc bench train``.

Every point is measured in blocks of a few minibatches: all arms visit a block one after the other, in an order that is turned round from
block to block, so that warming up and other users of the machine meet all alike. Before the first block every arm runs the largest
microbatch once, and small ones: memory, libraries and kernels are in place then. The results of a point are written when it is done, and
if the time budget ends before, as far as it got.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc.bench.agreement import require_agreement
from primus_odc.bench.clock import Clock
from primus_odc.bench.data import BenchMinibatch, make_minibatch, make_samples
from primus_odc.bench.job import IDEAL, ArmSpec, Job, arm_spec
from primus_odc.bench.lengths import draw_minibatches
from primus_odc.bench.results import append, identity
from primus_odc.bench.shapes import SHAPES
from primus_odc.bench.stations import Stations
from primus_odc.bench.trace import trace_point
from primus_odc.bench.visit import Runner, visit
from primus_odc.errors import OdcError
from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.compare_rank import tell


def bench_train(job: Job, device: torch.device, started: float) -> None:
    """Measure all points of ``job``; ``started``: the time (``time.monotonic``) from which the budget counts."""
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device.type, (job.world_size,))
    stations = Stations(job, mesh, device)
    run = identity(job.commit) if dist.get_rank() == 0 else {}
    warmed: dict[str, int] = {}
    with collecting_between_steps() as collect:
        for point in job.points:
            measured = _Point(job, stations, device, point, warmed, collect)
            complete = measured.measure(started)
            if dist.get_rank() == 0 and measured.has_steps:
                append(Path(job.out), run, measured.entry())
            measured.check()
            tell(f"{measured.name}: {measured.outcome(complete)}")
            if complete and job.trace is not None:
                trace_point(Path(job.trace), measured.name, measured.runners(), measured.blocks[0], device, collect)
            if not complete:
                break
    stations.close()


class _Point:
    """One number of samples per rank at one cap, in all arms."""

    def __init__(
        self, job: Job, stations: Stations, device: torch.device, point: tuple[int, int], warmed: dict[str, int], collect: Any
    ) -> None:
        self._warmed = warmed
        self._job = job
        self._stations = stations
        self._device = device
        self._clock = Clock(device)
        self._collect = collect
        self.samples_per_rank, self.cap = point
        self.name = f"{self.samples_per_rank} samples a rank, cap {self.cap}"
        self._arms = [arm_spec(name) for name in job.arms]
        self._steps: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in self._arms}
        self._memory: dict[str, list[dict[str, int]]] = {}
        self._shape = SHAPES[job.shape]
        self.blocks = self._make_blocks()

    @property
    def has_steps(self) -> bool:
        """Whether anything was measured."""
        return any(self._steps.values())

    def outcome(self, complete: bool) -> str:
        """What :meth:`measure` came to, in words."""
        if complete:
            return f"written: {self._job.out}"
        over = f"the time budget of {self._job.budget_s:g} s is over"
        return f"{over}; written as far as it got: {self._job.out}" if self.has_steps else f"{over} before its first block; nothing written"

    def measure(self, started: float) -> bool:
        """Run all blocks; returns whether the budget was enough."""
        if self._over(started, 0.0):
            return False
        longest = max(tokens for block in self.blocks for arm in self._arms for tokens in _tokens(block[arm.name]))
        for arm in self._arms:
            with saying_what_does_not_fit(f"{self.name}, {arm.name}"):
                self._warm_up(arm, longest)
        gc.collect()
        gc.freeze()  # the models are here to stay: what is collected between visits is small then
        slowest_s = 0.0
        for number, block in enumerate(self.blocks):
            if self._over(started, slowest_s):
                return False
            begin = time.monotonic()
            arms = self._arms if number % 2 == 0 else self._arms[::-1]
            for arm in arms:
                with saying_what_does_not_fit(f"{self.name}, {arm.name}"):
                    self._visit(arm, block[arm.name], number)
            slowest_s = max(slowest_s, time.monotonic() - begin)
            tell(f"{self.name}, block {number + 1}/{len(self.blocks)}, ms: {self._latest(len(block[arms[0].name]))}")
        return True

    def entry(self) -> dict[str, Any]:
        """What is written to the file."""
        job = self._job
        settings = ("shape", "layers", "device", "world_size", "transport", "ranks_per_node", "sequence", "seed", "optimizer")
        keep = (*settings, "clip_grad", "lengths", "minibatches", "fixed_tokens", "share_model", "deterministic", "command")
        return {
            "kind": "train",
            **{key: getattr(job, key) for key in keep},
            "samples_per_rank": self.samples_per_rank,
            "cap": self.cap,
            "steps": self._steps,
            "memory": self._memory,
        }

    def check(self) -> None:
        """
        Raises:
            VerificationError: an arm has computed something else than the first.
        """
        require_agreement(self.name, {name: steps for name, steps in self._steps.items() if name != IDEAL})

    def runners(self) -> list[Any]:
        """For each arm a function that makes its runner."""
        return [lambda arm=arm: self._runner(arm) for arm in self._arms]

    def _make_blocks(self) -> list[dict[str, list[BenchMinibatch]]]:
        job, cost_model = self._job, self._shape.with_layers(self._job.layers).cost_model(self._job.fixed_tokens)
        count = self.samples_per_rank * job.world_size
        divisor = self._shape.length_divisor
        drawn = draw_minibatches(job.lengths, count, job.minibatches, self.cap, job.seed, self.samples_per_rank, divisor)
        minibatches: list[dict[str, BenchMinibatch]] = []
        for number, lengths in enumerate(drawn):
            samples = make_samples(lengths, self._shape.vocab_size, number)
            plans: dict[tuple[str, bool], BenchMinibatch] = {}
            for arm in self._arms:
                key = (arm.policy, arm.pads_empty_ranks)
                if key not in plans:
                    plans[key] = make_minibatch(samples, arm, cost_model, self.cap, job.world_size, dist.get_rank(), self._device)
            minibatches.append({arm.name: plans[arm.policy, arm.pads_empty_ranks] for arm in self._arms})
        chunks = [minibatches[start : start + job.sequence] for start in range(0, len(minibatches), job.sequence)]
        return [{arm.name: [minibatch[arm.name] for minibatch in chunk] for arm in self._arms} for chunk in chunks]

    def _runner(self, arm: ArmSpec) -> Runner:
        return Runner(arm, self._stations, self._clock, self._job.clip_grad)

    def _warm_up(self, arm: ArmSpec, longest: int) -> None:
        if self._warmed.get(arm.name, 0) >= longest:
            return
        cost_model = self._shape.with_layers(self._job.layers).cost_model(self._job.fixed_tokens)
        # One large microbatch, then two small ones, in several steps where a CUDA graph is captured in a later one.
        small = max(2, longest // 8)
        plans = [(longest, 1), *[(small, 2)] * (4 if self._job.optimizer == "graph" else 1)]
        minibatches = []
        for length, count in plans:
            samples = make_samples([length] * (count * self._job.world_size), self._shape.vocab_size, 0)
            minibatches.append(make_minibatch(samples, arm, cost_model, length, self._job.world_size, dist.get_rank(), self._device))
        runner = self._runner(arm)
        begin = time.monotonic()
        visit(runner, minibatches, self._clock)
        runner.leave()
        self._warmed[arm.name] = longest
        tell(f"{self.name}, warm-up of {arm.name} with {longest} tokens a rank: {time.monotonic() - begin:.1f} s")

    def _visit(self, arm: ArmSpec, minibatches: Sequence[BenchMinibatch], block: int) -> None:
        self._collect()
        runner = self._runner(arm)
        if self._job.share_model:
            visit(runner, minibatches[:1], self._clock)  # the allocator starts empty where an engine came or went
        resting, before = self._resting_bytes(arm, runner), 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        steps = visit(runner, minibatches, self._clock)
        above = torch.cuda.max_memory_allocated(self._device) - before if self._device.type == "cuda" else 0
        runner.leave()
        engine = runner.station.engine if runner.station is not None else None
        memory = {
            "resting": resting,
            "above_resting": above,
            "engine": sum(engine.memory.values()) if engine is not None else 0,
            "engine_seen_by_device": runner.station.engine_bytes if runner.station is not None else 0,
        }
        ranks: list[dict[str, int]] = [memory] * self._job.world_size
        dist.all_gather_object(ranks, memory)
        known = self._memory.get(arm.name, ranks)
        self._memory[arm.name] = [{key: max(old[key], new[key]) for key in new} for old, new in zip(known, ranks, strict=True)]
        for offset, (minibatch, step) in enumerate(zip(minibatches, steps, strict=True)):
            plan = minibatch.plan
            self._steps[arm.name].append(
                {
                    "minibatch": block * self._job.sequence + offset,
                    "target_tokens": minibatch.target_tokens,
                    "microbatches": [[[plan.lengths[i] for i in bucket] for bucket in rank] for rank in plan.microbatches],
                    "ranks": [asdict(rank) for rank in step],
                }
            )

    def _resting_bytes(self, arm: ArmSpec, runner: Runner) -> int:
        return self._stations.replica_bytes() if arm.name == IDEAL or runner.station is None else runner.station.resting_bytes()

    def _latest(self, count: int) -> str:
        parts = []
        for name, steps in self._steps.items():
            parts.append(f"{name} " + " ".join(f"{max(rank['ms'] for rank in step['ranks']):.1f}" for step in steps[-count:]))
        return ", ".join(parts)

    def _over(self, started: float, block_s: float) -> bool:
        """Whether another block of ``block_s`` would go past the budget; rank 0 decides for all."""
        over = [self._job.budget_s > 0 and time.monotonic() - started + block_s > self._job.budget_s]
        dist.broadcast_object_list(over, src=0)
        return bool(over[0])


@contextmanager
def saying_what_does_not_fit(what: str) -> Iterator[None]:
    """
    Raises:
        OdcError: ``torch.OutOfMemoryError``, with what fills the memory and what to change.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OdcError(
            f"rank {dist.get_rank()}: {what} does not fit into this GPU beside the models of the other arms ({error}). Name fewer --arms "
            f"in a call (results add up in one file), or set --share-model (which excludes --optimizer graph), --layers, or a smaller cap"
        ) from error


def _tokens(minibatches: Sequence[BenchMinibatch]) -> list[int]:
    """Tokens of every microbatch of every rank."""
    return [
        sum(minibatch.plan.lengths[i] for i in bucket)
        for minibatch in minibatches
        for rank in minibatch.plan.microbatches
        for bucket in rank
    ]
