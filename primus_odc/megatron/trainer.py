"""The standalone training run: data, model and arm of an experiment, and the loop over its minibatches.

What stands below ``<workspace>/<work_group>/<user_name>/<exp_name>``: ``steps.jsonl`` (:mod:`primus_odc.report.logs`), one line a step;
checkpoints stand where ``save`` says, token caches below the workspace. A run is continued by ``load``; it then goes on writing its
own step log.

All ranks walk through the same minibatches, evaluations and checkpoints, because each follows from the step number and the file alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc.config import ParsedComm, parse_odc
from primus_odc.data import MinibatchStream, TokenDataset, build_dataset, build_tokenizer
from primus_odc.errors import ConfigError, DataError, PlanError
from primus_odc.experiment import Experiment
from primus_odc.megatron.arm import Arm, Minibatch, MinibatchFactory, StepOutcome, evaluation_minibatches, policy_of
from primus_odc.megatron.checkpoint import latest_step, load_checkpoint, save_checkpoint
from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.gpt_config import gpt_config
from primus_odc.megatron.train_config import TrainConfig, parse_train
from primus_odc.planning import CostModel
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, log_path
from primus_odc.report.machine import describe_machine, describe_versions

logger = logging.getLogger("primus_odc")


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """A checked experiment."""

    experiment: Experiment
    params: dict[str, Any]
    """Of the trainer module, normalised."""
    train: TrainConfig
    comm: ParsedComm
    max_tokens: int
    """Most tokens of one microbatch."""
    cost_model: CostModel

    @classmethod
    def of(cls, experiment: Experiment, params: dict[str, Any]) -> RunOptions:
        """Check everything that can be checked before any process group exists.

        Raises:
            ConfigError: wrong keys of the loop or of communication; ``comm_backend`` is not set.
        """
        comm, train = parse_odc(params), parse_train(params)
        policy_of(comm.arm)
        cap = comm.odc.max_tokens_per_microbatch or params.get("seq_length")
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise ConfigError([f"seq_length is {cap!r}; it must be a whole number of at least 1, being the most tokens of a microbatch"])
        cost_model = CostModel.from_config(comm.odc.cost_model) if comm.odc.cost_model != "attention" else _flops(params)
        return cls(experiment=experiment, params=params, train=train, comm=comm, max_tokens=cap, cost_model=cost_model)

    def planning(self, arm: Arm, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of :func:`primus_odc.megatron.minibatch.make_minibatch` and its callers."""
        return {
            "policy": arm.policy,
            "cost_model": self.cost_model,
            "max_tokens": self.max_tokens,
            "world_size": arm.world_size,
            "rank": arm.rank,
            "device": device,
            "pad_empty_ranks": arm.pad_empty_ranks,
        }


def _flops(params: Mapping[str, Any]) -> CostModel:
    """``cost_model: attention``: the FLOPs of the model's layers. Its head is left out: only target positions reach it."""
    described = gpt_config(params, vocab_size=1)
    config = described.transformer
    return CostModel.from_model_shape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size or 4 * config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        vocab_size=0,
        kv_channels=config.kv_channels,
        gated_mlp=config.gated_linear_unit,
        recompute=described.recomputed_layers == config.num_layers,
    )


def train(options: RunOptions, device: torch.device, on_step: Callable[[Minibatch, StepOutcome], None] | None = None) -> None:
    """Train from the beginning or from a checkpoint to ``train_iters``; every rank calls it, with torch.distributed initialised.

    Args:
        options: the experiment.
        device: of this rank.
        on_step: called after every step.

    Raises:
        OdcError: anything wrong with configuration, data, checkpoint or a peer.
    """
    params, train = options.params, options.train
    # The model first: reading the data may take long, and a wrong key of the model should not.
    vocab_size = train.padded_vocab_size(build_tokenizer(params).vocab_size)
    arm = Arm(params, options.comm, vocab_size, init_device_mesh(device.type, (dist.get_world_size(),)), device)
    dataset = _dataset(options, "train")
    stream = MinibatchStream(len(dataset), train.global_batch_size, train.seed, dataset.fingerprint)
    first_step = _resume(train, arm, stream)
    validation = None
    if train.eval_interval is not None:
        held_out = _dataset(options, "validation")
        validation = evaluation_minibatches(held_out, train.eval_iters, train.global_batch_size, **options.planning(arm, device))
    if arm.rank == 0:
        _summary(options, arm, dataset)
    log = _open_log(options, arm, dataset, first_step) if arm.rank == 0 else None
    factory = MinibatchFactory(dataset, stream, first_step=first_step, **options.planning(arm, device))
    try:
        with factory, collecting_between_steps() as collect:
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
    finally:
        if log is not None:
            log.close()
    arm.close()


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
    step = train.ckpt_step if train.ckpt_step is not None else latest_step(train.load)
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
        logger.info("continuing after step %d from %s", step, train.load)
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


def _open_log(options: RunOptions, arm: Arm, dataset: TokenDataset, first_step: int) -> StepLogWriter | None:
    header = LogHeader(
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
    run = options.experiment.root
    try:
        return StepLogWriter(run, header, first_step)
    except DataError as error:
        # A checkpoint may be continued with another number of ranks or in another folder; only its log cannot.
        logger.warning("no step log: %s", error)
        return None


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
    logger.info("arm %s on %d ranks: %s plan, cost model %s", arm.name, arm.world_size, arm.policy, options.cost_model.name)
    logger.info("model: %d parameters in %d FSDP2 units", count, arm.num_units)
    logger.info("data: %s", dataset.summary())
    logger.info(
        "%d minibatches of %d samples; log: %s",
        options.train.train_iters,
        options.train.global_batch_size,
        log_path(options.experiment.root),
    )
