"""One arm: a model, its optimizer and its communication, trained minibatch by minibatch.

All arms have one objective, the loss summed over the minibatch's targets divided by their number over all ranks, which every rank knows
from the plan. They differ in two things only: how parameters and gradients travel, and which rank runs which samples.

================  ==========================================  ==========================================================
arm               communication                               plan
================  ==========================================  ==========================================================
nccl_pad          stock FSDP2                                 LB-Micro: equal counts, empty buckets where needed
nccl_localsort    stock FSDP2                                 one sample a microbatch, sorted within the rank
nccl_zero2        stock FSDP2, unsharded in the minibatch     LB-Mini; a rank without work runs one padding microbatch
odc_pad           on demand                                   the plan of nccl_pad
odc_nopad         on demand                                   LB-Mini, zero counts included
================  ==========================================  ==========================================================

Stock FSDP2 takes the mean over ranks; the factor that undoes it is part of the loss there. Gradients are thus normalised once, in all arms.

Beside FSDP2's own, the stock arms have two collectives a step: an all-gather of what each rank has to report, and the gradient norm. On
demand there is the first, which comes right after settle, where all ranks have just met anyway, and on a GPU the norm's, of one number.

On a GPU the host reads loss and norm only when the optimizer step and the publication are queued, so that the device has work while the
host begins the next step. Numbers that are not finite make the optimizer change nothing there too, by a flag that the device computes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_odc.config import ParsedComm
from primus_odc.errors import OdcError, PlanError
from primus_odc.megatron.fetched import Fetched
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.meter import Meter
from primus_odc.megatron.microbatch import Microbatch, to_device
from primus_odc.megatron.minibatch import Minibatch
from primus_odc.megatron.model import build_gpt
from primus_odc.megatron.on_demand import MeteredEngine
from primus_odc.megatron.optimizer import build_optimizer
from primus_odc.megatron.run_options import policy_of
from primus_odc.megatron.sharding import mixed_precision, shard_gpt
from primus_odc.report.timeline import SpanRecorder

logger = logging.getLogger("primus_odc")


@dataclass(kw_only=True, slots=True, frozen=True)
class StepOutcome:
    """What one :meth:`Arm.train_step` did; what is global is equal on all ranks."""

    step: int
    skipped: bool
    """The minibatch had no target: weights, moments, step count and schedule are as before."""
    loss: float | None
    """Loss sum over all ranks divided by all targets; None when skipped."""
    grad_norm: float | None
    """Global norm before clipping; None when skipped."""
    learning_rate: float
    """Of this step, or of the next one when skipped."""
    seconds: float
    """Wall time on this rank."""
    waited_s: tuple[float, ...]
    """[rank] seconds without computing, waits and exposed transfers together: the rank's share of the time from the previous step's report
    to this one's, of ``seconds``. On a GPU settle and publish only, see :mod:`primus_odc.megatron.meter`, as far as the device had ended
    them when this step settled."""
    counts: tuple[int, ...]
    """[rank] microbatches run."""
    tokens: int
    """Over all ranks, padding not counted."""
    bytes_gathered: int
    """Parameters this rank received from others."""
    bytes_reduced: int
    """Gradients this rank moved: sent in collectives, pulled or pushed on demand."""
    collectives: int | None
    """Between the beginning and the end of the step, FSDP2's, the engine's and this trainer's; None where FSDP2's are not counted."""


class Arm:
    """One model trained in one arm; made on all ranks of ``mesh`` at once.

    Attributes:
        name: reporting name.
        policy: how its minibatches are planned.
        pad_empty_ranks: whether a rank without work has to run a padding microbatch.
        model, optimizer, scheduler: what a checkpoint keeps; after changing parameters call :meth:`publish`.
        engine: the on-demand engine, None in the stock arms.
        meter: this rank's clock.
        trained_steps: optimizer steps taken.
    """

    def __init__(self, params: Mapping[str, Any], comm: ParsedComm, vocab_size: int, mesh: DeviceMesh, device: torch.device) -> None:
        """
        Args:
            params: keys of the trainer module.
            comm: ``parse_odc(params)``.
            vocab_size: rows of embedding and head.
            mesh: all ranks of the job, 1-D, or 2-D (replicate, shard) for HSDP.
            device: of this rank.

        Raises:
            ConfigError: keys that are wrong or ask for something this trainer cannot do.
        """
        self.name = comm.arm
        self.policy = policy_of(comm.arm)
        self.pad_empty_ranks = comm.arm == "nccl_zero2"
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.trained_steps = 0
        self._device = device
        self._clip_grad = float(params.get("clip_grad", 1.0))
        self.meter = Meter(device)
        self._warned_masked = False
        self._own_collectives = 0
        on_demand = comm.arm.startswith("odc")
        # On a GPU the head's gradient is on its way while the blocks' are made; on a CPU nothing would be gained.
        self.model = shard_gpt(
            build_gpt(params, vocab_size, device=device), mesh, mixed_precision(params, on_demand=on_demand), separate_head=self.on_gpu
        )
        self._modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.optimizer = build_optimizer(self.model, params, lasting_gradients=on_demand)
        self.scheduler = build_scheduler(self.optimizer, params)
        self.engine = MeteredEngine(self.model, comm.odc, self.meter) if on_demand else None
        self._reported_s = self.meter.exposed_s
        self._reported_at = self._ended_at = time.perf_counter()
        if comm.arm == "nccl_zero2":
            self._modules[0].set_reshard_after_forward(False)
            self._modules[0].set_reshard_after_backward(False)

    @property
    def on_gpu(self) -> bool:
        """Whether the host only queues what a device does."""
        return self._device.type != "cpu"

    @property
    def num_units(self) -> int:
        """FSDP2 units: one a block, the root, and on GPUs the head."""
        return len(self._modules)

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, minibatch: Minibatch, recorder: SpanRecorder | None = None) -> StepOutcome:
        """Train on one minibatch; all ranks call it with the same one.

        Args:
            minibatch: planned with this arm's ``policy`` and ``pad_empty_ranks``.
            recorder: takes this step's spans.

        Raises:
            PlanError: the ranks hold different minibatches.
            OdcError: loss or gradient norm are not finite.
        """
        start = time.perf_counter()
        self._reported_at += start - self._ended_at  # what happened between two steps is part of neither
        (gathered, reduced), collectives = self._bytes(), self._count()
        learning_rate = self.learning_rate
        loss = grad_norm = None
        idle: tuple[float, ...] = (0.0,) * self.world_size
        if minibatch.target_tokens == 0:
            if self.rank == 0:
                logger.warning("step %d skipped: none of its %d samples has a target token", minibatch.step, len(minibatch.sample_ids))
        else:
            self.meter.recorder = recorder
            try:
                loss, grad_norm, idle = self._train(minibatch)
            finally:
                self.meter.recorder = None
        gathered_now, reduced_now = self._bytes()
        self._ended_at = time.perf_counter()
        seconds = self._ended_at - start
        return StepOutcome(
            step=minibatch.step,
            skipped=loss is None,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            seconds=seconds,
            waited_s=tuple(share * seconds for share in idle),
            counts=minibatch.counts,
            tokens=minibatch.tokens,
            bytes_gathered=gathered_now - gathered,
            bytes_reduced=reduced_now - reduced,
            collectives=self._count() - collectives if self.engine is not None or self.meter.time_collectives else None,
        )

    def evaluate(self, minibatches: Sequence[Minibatch]) -> float:
        """Loss over all targets of ``minibatches``, which are planned as for training; weights and gradients stay as they are.

        Legal between two training steps. On demand every rank may run any number of microbatches.
        """
        exposed = self.meter.exposed_s
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self.model.eval()
        with torch.no_grad():
            for minibatch in minibatches:
                for microbatch in minibatch.microbatches:
                    total += self.model(microbatch)
        self.model.train()
        self.reshard()
        sums = self._exchange(total.reshape(1)).flatten().tolist()
        self._reported_s += self.meter.exposed_s - exposed  # no part of the next step
        return math.fsum(sums) / sum(minibatch.target_tokens for minibatch in minibatches)

    def publish(self) -> None:
        """Make parameters that were changed outside :meth:`train_step` known to all ranks; every rank calls it."""
        self.reshard()
        if self.engine is not None:
            self.engine.publish()

    def reshard(self) -> None:
        """Free every unsharded parameter, so that parameters are the shards a checkpoint keeps."""
        for module in self._modules:
            module.reshard()

    def close(self) -> None:
        """End on-demand communication; model and optimizer stay usable with FSDP2's own. Every rank calls it."""
        if self.engine is not None:
            self.engine.detach()
            self.engine = None

    def _train(self, minibatch: Minibatch) -> tuple[float, float, tuple[float, ...]]:
        """(global loss, gradient norm, [rank] share of the time without computing, from report to report)"""
        if self.engine is not None:
            self.engine.begin_minibatch(len(minibatch.microbatches))
            loss_sum = self._run_microbatches(minibatch, 1.0 / minibatch.target_tokens)
            self.engine.settle()
        else:
            with self.meter.collectives():
                loss_sum = self._run_microbatches(minibatch, self.world_size / minibatch.target_tokens)
            if self.pad_empty_ranks:
                self.reshard()
        reports = self._report(minibatch, loss_sum)
        if not self.on_gpu:
            loss, waited = self._read_reports(minibatch, Fetched(reports))
        with self.meter.span("optimizer"):
            norm = self._clip()
            skip = None
            if not self.on_gpu:
                grad_norm = self._read_norm(minibatch, loss, Fetched(norm))
            else:
                fetched = Fetched(reports), Fetched(norm)
                skip = (~(reports.isfinite().all() & norm.isfinite())).to(torch.float32)
            self.optimizer.step(skip=skip)
            self.optimizer.zero_grad()
        if self.engine is not None:
            self.engine.publish()
        if self.on_gpu:
            loss, waited = self._read_reports(minibatch, fetched[0])
            grad_norm = self._read_norm(minibatch, loss, fetched[1])
        self.scheduler.step(1)
        self.trained_steps += 1
        return loss, grad_norm, waited

    def _run_microbatches(self, minibatch: Minibatch, scale: float) -> torch.Tensor:
        """Forward and backward of this rank's microbatches; returns its loss sum on the device, not to wait for it before settle."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        last = len(minibatch.microbatches) - 1
        for number, microbatch in enumerate(minibatch.microbatches):
            self._warn_masked(minibatch, number, microbatch)
            if self.pad_empty_ranks:
                self._modules[0].set_requires_gradient_sync(number == last)
            with self.meter.span("forward", number):
                loss = self.model(microbatch)
            with self.meter.span("backward", number):
                (loss * scale).backward()
            total += loss.detach()
        return total

    def _warn_masked(self, minibatch: Minibatch, number: int, microbatch: Microbatch) -> None:
        bucket = minibatch.plan.microbatches[self.rank][number : number + 1]
        if microbatch.num_targets == 0 and bucket and bucket[0] and not self._warned_masked:
            self._warned_masked = True
            logger.warning(
                "step %d: no sample of microbatch %d of rank %d has a target token (%s); such microbatches add nothing to loss and "
                "gradient and are not mentioned again",
                minibatch.step,
                number,
                self.rank,
                ", ".join(minibatch.sample_ids[i] for i in bucket[0][:4]),
            )

    def _report(self, minibatch: Minibatch, loss_sum: torch.Tensor) -> torch.Tensor:
        """[ranks, 3], where the model is: loss sum, share without computing since the last report, minibatch of every rank; one collective.

        What a step does behind its report counts for the next one. On a GPU that is all that the device has not ended yet, and may be more
        than the next step lasts.
        """
        exposed, now = self.meter.known_s, time.perf_counter()
        share = min(1.0, (exposed - self._reported_s) / (now - self._reported_at))
        with self.meter.span("communication", label="report"):
            # 48 bits of the digest: a float64 holds them exactly.
            values = [share, float(int(minibatch.digest[:12], 16))]
            mine = to_device(torch.tensor(values, dtype=torch.float64, device="cpu"), self._device)
            reports = self._exchange(torch.cat((loss_sum.reshape(1), mine)))
        self._reported_s, self._reported_at = exposed, now
        return reports

    def _read_reports(self, minibatch: Minibatch, fetched: Fetched) -> tuple[float, tuple[float, ...]]:
        """(global loss, [rank] share without computing); compares the minibatches of the ranks."""
        reports = fetched.read().tolist()
        if different := [rank for rank, report in enumerate(reports) if report[2] != reports[0][2]]:
            raise PlanError(
                f"step {minibatch.step}: ranks {different} hold another minibatch than rank 0; every rank needs the same data, "
                "configuration and version of primus_odc and numpy"
            )
        loss = math.fsum(report[0] for report in reports) / minibatch.target_tokens
        if not math.isfinite(loss):
            guilty = [rank for rank, report in enumerate(reports) if not math.isfinite(report[0])]
            raise OdcError(f"step {minibatch.step}: the loss is {loss}, from ranks {guilty}; nothing was updated")
        return loss, tuple(report[1] for report in reports)

    def _read_norm(self, minibatch: Minibatch, loss: float, fetched: Fetched) -> float:
        grad_norm = float(fetched.read())
        if not math.isfinite(grad_norm):
            raise OdcError(f"step {minibatch.step}: the gradient norm is {grad_norm} at a loss of {loss}; nothing was updated")
        return grad_norm

    def _exchange(self, mine: torch.Tensor) -> torch.Tensor:
        """``mine`` (``[n]``) of every rank, in rank order: ``[ranks, n]``; a collective."""
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        if self.engine is not None and not self.on_gpu:
            work = dist.all_gather(parts, mine, async_op=True)
            assert work is not None
            # gloo itself would wait as long as the process group's time-out for a rank that is stopped.
            self.engine.wait_for(work.is_completed, "report of all ranks")
            work.wait()
        else:
            dist.all_gather(parts, mine)
        self._own_collectives += 1
        return torch.stack(parts)

    def _clip(self) -> torch.Tensor:
        """Clip to ``clip_grad`` (0: only measure) and return the norm before: 0-dim, where the model is."""
        limit = self._clip_grad or math.inf
        if self.engine is not None:
            return self.engine.clip_grad_norm_(limit)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if not isinstance(norm, DTensor):
            return norm
        self._own_collectives += 1
        return norm.full_tensor()

    def _bytes(self) -> tuple[int, int]:
        if self.engine is None:
            return self.meter.bytes_gathered, self.meter.bytes_reduced
        return self.engine.bytes_moved()

    def _count(self) -> int:
        """Collectives so far."""
        return self._own_collectives + self.meter.collectives_timed + (self.engine.collectives() if self.engine is not None else 0)
