"""The standalone training run: data, model and arm of an experiment, and the loop over its minibatches.

What stands below ``<workspace>/<work_group>/<user_name>/<exp_name>``: ``steps.jsonl`` (:mod:`primus_odc.report.logs`), one line a step;
checkpoints stand where ``save`` says, token caches below the workspace. A run is continued by ``load``; it then goes on writing its
own step log, or begins one at that step in another folder. Nothing of another run is written over, earlier or running
(:mod:`primus_odc.megatron.outputs`).

All ranks walk through the same minibatches, evaluations and checkpoints, because each follows from the step number and the file alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc._words import counted
from primus_odc.data import MinibatchStream, TokenDataset, build_dataset, build_stream
from primus_odc.errors import DataError, PlanError
from primus_odc.megatron.arm import Arm, Minibatch, StepOutcome
from primus_odc.megatron.checkpoint import load_checkpoint, save_checkpoint
from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.minibatch import Maker, MinibatchFactory, evaluation_minibatches, make_minibatch
from primus_odc.megatron.outputs import hold_save, step_to_load
from primus_odc.megatron.run_options import RunOptions, vocabulary_rows
from primus_odc.megatron.train_config import TrainConfig
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, log_path
from primus_odc.report.machine import describe_machine, describe_versions

logger = logging.getLogger("primus_odc")


def train(options: RunOptions, device: torch.device, on_step: Callable[[Minibatch, StepOutcome], None] | None = None) -> None:
    """Train from the beginning or from a checkpoint to ``train_iters``; every rank calls it, with torch.distributed initialised.

    Args:
        options: the experiment.
        device: of this rank.
        on_step: called after every step.

    Raises:
        OdcError: anything wrong with configuration, data, checkpoint or a peer.
    """
    with hold_save(options.train):
        _train(options, device, on_step)


def _train(options: RunOptions, device: torch.device, on_step: Callable[[Minibatch, StepOutcome], None] | None) -> None:
    params, train = options.params, options.train
    # The model first: reading the data may take long, and a model that does not fit should not.
    vocab_size = vocabulary_rows(params, train)
    arm = Arm(params, options.comm, vocab_size, init_device_mesh(device.type, (dist.get_world_size(),)), device)
    dataset = _dataset(options, "train")
    stream = build_stream(dataset, train.global_batch_size, train.seed)
    first_step = _resume(train, arm, stream)
    make = _maker(options, arm, device)
    validation = None
    if train.evaluates:
        held_out = _dataset(options, "validation")
        validation = evaluation_minibatches(held_out, train.eval_iters, train.global_batch_size, make)
        if arm.rank == 0 and len(held_out) < (asked := train.eval_iters * train.global_batch_size):
            told = "an evaluation has each of the %d validation samples once, which are fewer than eval_iters x global_batch_size = %d"
            logger.warning(told, len(held_out), asked)
    if arm.rank == 0:
        _summary(options, arm, dataset)
    with (
        _open_log(options, arm, dataset, first_step) as log,
        MinibatchFactory(dataset, stream, make, first_step=first_step) as factory,
        collecting_between_steps() as collect,
    ):
        for step in range(first_step, train.train_iters):
            minibatch = factory.get(step)
            if step == first_step:
                _require_agreement(minibatch, dataset)
            outcome = arm.train_step(minibatch)
            collect()
            if log is not None:
                log.write(_record(outcome))
            if arm.rank == 0 and ((step + 1) % train.log_interval == 0 or step + 1 == train.train_iters):
                logger.info(_line(outcome, train.train_iters))
            if on_step is not None:
                on_step(minibatch, outcome)
            if validation is not None and train.eval_interval is not None and (step + 1) % train.eval_interval == 0:
                _evaluate(arm, validation, step)
            leaving = train.exit_interval is not None and (step + 1) % train.exit_interval == 0
            last = leaving or step + 1 == train.train_iters
            if train.save is not None and (last or (train.save_interval is not None and (step + 1) % train.save_interval == 0)):
                _save(train.save, step + 1, arm, stream)
            if leaving:
                break
    arm.close()


def _maker(options: RunOptions, arm: Arm, device: torch.device) -> Maker:
    return partial(
        make_minibatch,
        policy=arm.policy,
        cost_model=options.cost_model,
        max_tokens=options.max_tokens,
        world_size=arm.world_size,
        rank=arm.rank,
        device=device,
        pad_empty_ranks=arm.pad_empty_ranks,
    )


def _dataset(options: RunOptions, split: Any) -> TokenDataset:
    return build_dataset(
        options.params,
        split,
        workspace=options.experiment.workspace,
        max_tokens=options.max_tokens,
        over_length=options.comm.odc.over_length,
    )


def _resume(train: TrainConfig, arm: Arm, stream: MinibatchStream) -> int:
    """The first step to train."""
    if train.load is None:
        return 0
    step = step_to_load(train)
    found: list[int | None] = [None] * arm.world_size
    dist.all_gather_object(found, step)
    if len(set(found)) > 1:
        raise DataError(f"{train.load}: the ranks see different latest checkpoints, {found}; load must be the same folder on all hosts")
    if step is None:
        if arm.rank == 0:
            logger.info("%s holds no checkpoint: the run starts at its beginning", train.load)
        return 0
    load_checkpoint(train.load, step, arm, stream)
    if arm.rank == 0:
        over = f"; train_iters is {train.train_iters}, so nothing is left to train" if step >= train.train_iters else ""
        logger.info("continuing after step %d from %s%s", step, train.load, over)
    return step


def _require_agreement(minibatch: Minibatch, dataset: TokenDataset) -> None:
    """The first minibatch is compared before it runs: with another count on some rank, collectives would hang instead of failing."""
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, f"{dataset.fingerprint} {minibatch.digest}")
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise PlanError(
            f"step {minibatch.step}: ranks {different} hold another minibatch than rank 0; every rank needs the same data, "
            "configuration and version of primus_odc and numpy"
        )


def _save(folder: Path, step: int, arm: Arm, stream: MinibatchStream) -> None:
    started = time.perf_counter()
    written = save_checkpoint(folder, step, arm, stream)
    if arm.rank == 0:
        logger.info("saved %s in %.1f s", written, time.perf_counter() - started)


def _evaluate(arm: Arm, validation: list[Minibatch], step: int) -> None:
    started = time.perf_counter()
    loss = arm.evaluate(validation)
    if arm.rank == 0:
        targets = sum(minibatch.target_tokens for minibatch in validation)
        logger.info("validation after step %d | loss %.6f over %d targets | %.1f s", step + 1, loss, targets, time.perf_counter() - started)


@contextmanager
def _open_log(options: RunOptions, arm: Arm, dataset: TokenDataset, first_step: int) -> Iterator[StepLogWriter | None]:
    """The step log, on rank 0; where it cannot be written, every rank raises."""
    failure: list[str | None] = [None]
    log = None
    if arm.rank == 0:
        try:
            log = StepLogWriter(options.experiment.root, _header(options, arm, dataset), first_step, resumed=options.train.load is not None)
        except DataError as error:
            failure[0] = str(error)
        else:
            if log.dropped:
                logger.warning("%s: its last %d steps are cut off and trained again", log_path(options.experiment.root), log.dropped)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise DataError(failure[0])
    with log or nullcontext():
        yield log


def _header(options: RunOptions, arm: Arm, dataset: TokenDataset) -> LogHeader:
    return LogHeader(
        arm=arm.name,
        world_size=arm.world_size,
        seed=options.train.seed,
        global_batch_size=options.train.global_batch_size,
        data={
            "source": options.params["sft_dataset_name"],
            "tokenizer": options.params["tokenizer_type"],
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
        },
        config=options.params,
        machine=describe_machine(),
        versions=describe_versions(),
    )


def _record(outcome: StepOutcome) -> StepRecord:
    return StepRecord(
        step=outcome.step,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        ms=outcome.seconds * 1e3,
        tokens=outcome.tokens,
        microbatches=list(outcome.counts),
        waited_s=list(outcome.waited_s),
        skipped=outcome.skipped,
        collectives=outcome.collectives,
        learning_rate=None if outcome.skipped else outcome.learning_rate,
    )


def _line(outcome: StepOutcome, steps: int) -> str:
    head = f"step {outcome.step + 1}/{steps}"
    if outcome.skipped:
        return f"{head} | skipped: no target token in the minibatch"
    fewest, most = min(outcome.counts), max(outcome.counts)
    idle = [waited / outcome.seconds for waited in outcome.waited_s]
    return " | ".join(
        (
            head,
            f"loss {outcome.loss:.6f}",
            f"grad norm {outcome.grad_norm:.4f}",
            f"lr {outcome.learning_rate:.3e}",
            f"{outcome.tokens / outcome.seconds:.0f} tokens/s",
            f"{outcome.seconds * 1e3:.0f} ms",
            f"microbatches a rank {fewest}" + (f" to {most}" if most > fewest else ""),
            f"not computing {min(idle):.0%} to {max(idle):.0%}",
        )
    )


def _summary(options: RunOptions, arm: Arm, dataset: TokenDataset) -> None:
    """What is trained and how; the engine itself has told its modes and memory."""
    count = sum(p.numel() for p in arm.model.parameters())
    ranks = f"{counted(arm.world_size, 'rank')} of {counted(torch.get_num_threads(), 'thread')} each (OMP_NUM_THREADS)"
    logger.info("arm %s on %s: %s plan, cost model %s", arm.name, ranks, arm.policy, options.cost_model.name)
    logger.info("model: %d parameters in %d FSDP2 units", count, arm.num_units)
    logger.info("data: %s", dataset.summary())
    steps, batch = options.train.train_iters, options.train.global_batch_size
    work = f"{counted(steps, 'minibatch')} of {counted(batch, 'sample')}"
    logger.info("%s; log: %s", work, log_path(options.experiment.root))
