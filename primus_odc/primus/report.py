"""What a run in Primus tells: a line a step in Primus' log, and the step log that ``primus-odc compare --from-logs`` reads.

Primus' own line stays. Ours adds what it does not know: how many microbatches each rank ran, how long ranks computed nothing, and what was
moved. The step log is the standalone trainer's, ``steps.jsonl`` in the folder of the experiment, so runs of both can be compared.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from primus_odc.errors import DataError, PlanError
from primus_odc.fsdp.engine import Engine
from primus_odc.megatron.meter import Meter
from primus_odc.megatron.on_demand import MeteredEngine
from primus_odc.primus.plan import StepPlan
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, log_path
from primus_odc.report.machine import describe_machine, describe_versions

logger = logging.getLogger("primus_odc")

_MIB = 2**20
SAME_DATA = "every rank needs the same data, configuration and version of primus_odc and numpy"


class StepReporter:
    """Reports the steps of one run; every rank has one, rank 0 writes."""

    def __init__(self, arm: str, meter: Meter, log_interval: int, train_iters: int) -> None:
        self._arm = arm
        self._meter = meter
        self._log_interval, self._train_iters = log_interval, train_iters
        self._next_step: int | None = None
        self._log: StepLogWriter | None = None
        self._exposed_s = 0.0
        self._bytes = (0, 0)

    def open(self, folder: Path, first_step: int, args: Any, data: Mapping[str, object], config: Mapping[str, object]) -> None:
        """Start or continue the step log; rank 0 calls it.

        Args:
            folder: of the experiment.
            first_step: 0, or the step a checkpoint continues with.
            args: Megatron's arguments.
            data: what identifies the samples.
            config: keys to note in the log.
        """
        header = LogHeader(
            arm=self._arm,
            world_size=dist.get_world_size(),
            seed=args.seed,
            global_batch_size=args.global_batch_size,
            data=dict(data),
            config=dict(config),
            machine=describe_machine(),
            versions=describe_versions(),
        )
        try:
            self._log = StepLogWriter(folder, header, first_step, resumed=first_step > 0)
        except DataError as error:
            # A checkpoint may be continued with another number of ranks or in another folder; only its log cannot.
            logger.warning("no step log: %s", error)
        else:
            logger.info("step log: %s", log_path(folder))

    def next_step(self, first: int) -> int:
        """The step to begin; ``first`` is where the run began."""
        if self._next_step is None:
            self._next_step = first
            self._exposed_s = self._meter.exposed_s
        return self._next_step

    def skipped(self, plan: StepPlan) -> None:
        """The step left weights, moments and schedule alone."""
        self._next_step = plan.step + 1
        self._write(
            StepRecord(
                step=plan.step,
                loss=None,
                grad_norm=None,
                ms=0.0,
                tokens=plan.tokens,
                microbatches=list(plan.counts),
                waited_s=[0.0] * len(plan.counts),
                skipped=True,
            )
        )

    def trained(
        self,
        plan: StepPlan,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        seconds: float,
        engine: Engine | None,
        skipped: bool,
    ) -> None:
        """Report a step; every rank calls it (one collective).

        Args:
            loss: loss sum over all targets, divided by their number.
            grad_norm: global, before clipping.
            learning_rate: of this step.
            seconds: wall time on this rank.
            engine: None on collectives.
            skipped: Megatron took no optimizer step.

        Raises:
            PlanError: on every rank, if the ranks trained on different minibatches.
        """
        exposed = self._meter.exposed_s
        moved = engine.bytes_moved() if isinstance(engine, MeteredEngine) else (self._meter.bytes_gathered, self._meter.bytes_reduced)
        own = [exposed - self._exposed_s, *(float(now - before) for now, before in zip(moved, self._bytes, strict=True))]
        self._exposed_s, self._bytes = exposed, moved
        self._next_step = plan.step + 1
        # 48 bits of the digest: a float64 holds them exactly.
        ranks = self._exchange([*own, float(int(hashlib.sha256(plan.digest.encode()).hexdigest()[:12], 16))])
        if different := [number for number, rank in enumerate(ranks) if rank[3] != ranks[0][3]]:
            raise PlanError(f"step {plan.step + 1}: ranks {different} trained on another minibatch than rank 0; {SAME_DATA}")
        waited = [rank[0] for rank in ranks]
        self._write(
            StepRecord(
                step=plan.step,
                loss=None if skipped else loss,
                grad_norm=None if skipped else grad_norm,
                ms=seconds * 1e3,
                tokens=plan.tokens,
                microbatches=list(plan.counts),
                waited_s=waited,
                skipped=skipped,
                learning_rate=None if skipped else learning_rate,
            )
        )
        number = plan.step + 1
        if dist.get_rank() == 0 and (number % self._log_interval == 0 or number == self._train_iters):
            fewest, most = min(plan.counts), max(plan.counts)
            logger.info(
                "step %d/%d | %s | loss %.6f | grad norm %.6f | %d tokens | microbatches a rank %s %s | "
                "not computing %.0f to %.0f ms | a rank gathered %.1f MiB, reduced %.1f MiB",
                number,
                self._train_iters,
                self._arm,
                loss,
                grad_norm,
                plan.tokens,
                f"{fewest} to {most}" if most > fewest else fewest,
                list(plan.counts),
                min(waited) * 1e3,
                max(waited) * 1e3,
                max(rank[1] for rank in ranks) / _MIB,
                max(rank[2] for rank in ranks) / _MIB,
            )

    def close(self) -> None:
        """Close the step log; may be called twice."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, record: StepRecord) -> None:
        if self._log is not None:
            self._log.write(record)

    @staticmethod
    def _exchange(values: list[float]) -> list[list[float]]:
        """``values`` of every rank, in rank order; a collective."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts]
