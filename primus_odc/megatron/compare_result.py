"""From the rounds of a comparison to its result, with everything a reader has to know to judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primus_odc.megatron.arm import Arm
from primus_odc.megatron.round_records import ArmStep, Round
from primus_odc.report.arm import ArmPhases, ArmResult
from primus_odc.report.machine import describe_machine, describe_versions, utc_now
from primus_odc.report.result import ComparisonResult
from primus_odc.report.stats import median
from primus_odc.report.timeline import Timeline

WARMUP_ROUNDS = 2
_HEADING_KEYS = (
    "sft_dataset_name",
    "tokenizer_type",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "global_batch_size",
    "train_iters",
    "lr",
    "clip_grad",
    "bf16",
)

_ON_CPUS = (
    "Idle is the share of a step in which a rank's thread did not use the processor for forward, backward or the optimizer; an empty "
    "bucket, which makes counts equal, is padding and counts as idle, and so does time that other processes of this machine took.",
    "Timed steps of nccl arms ran without anything of ours inside FSDP2; the timeline is one minibatch run once more by every arm, "
    "with all transfers on record.",
)
_ON_GPUS = (
    "Idle is the share of a step in which a rank does not compute. What it computed is predicted from ideal's microbatches by the lengths "
    "of their samples, because transfers and waiting cannot be told from computing in an arm's own forward and backward; what these took "
    "longer counts as communication, waiting included.",
    "The timeline is one minibatch run once more by every arm: the stream that computes, whose forward and backward hold their own "
    "waiting. Single transfers are shown by primus-odc bench --trace.",
)


def warmup_rounds(rounds: int) -> int:
    """How many of the first rounds are left out of the statistics."""
    return min(WARMUP_ROUNDS, rounds - 1)


def timeline_step(rounds: Sequence[Round]) -> int:
    """The minibatch to draw: of those with unequal counts, or of all if there are none, the one whose speed-up is the most usual."""
    candidates = [step for step in range(warmup_rounds(len(rounds)), len(rounds)) if rounds[step].ideal is not None]
    names = list(rounds[0].arms)
    first, last = names[0], names[-1]
    unequal = [step for step in candidates if len(set(rounds[step].arms[last].outcome.counts)) > 1]
    ratios = {step: rounds[step].arms[first].ms / rounds[step].arms[last].ms for step in unequal or candidates or [0]}
    middle = median(list(ratios.values()))
    return min(ratios, key=lambda step: abs(ratios[step] - middle))


def build_result(
    rounds: Sequence[Round],
    timelines: Sequence[Timeline],
    arms: Sequence[Arm],
    params: Mapping[str, Any],
    *,
    max_tokens: int,
    data: str,
    followed: str,
    command: str,
) -> ComparisonResult:
    """The record of a comparison.

    Args:
        max_tokens: most tokens of one microbatch.
        data: one line about the data.
        followed: the arm whose weights ``ideal`` had.
    """
    ideal_ms = [step.ideal.ms if step.ideal is not None else 0.0 for step in rounds]
    parameters = sum(parameter.numel() for parameter in arms[0].model.parameters())
    config: dict[str, object] = {"parameters": parameters, "max_tokens_per_microbatch": max_tokens}
    config |= {key: params[key] for key in _HEADING_KEYS if key in params}
    return ComparisonResult.build(
        arms=[arm_result(name, [step.arms[name] for step in rounds]) for name in rounds[0].arms],
        warmup_steps=warmup_rounds(len(rounds)),
        machine={**describe_machine(), "collectives": "NCCL/RCCL" if arms[0].on_gpu else "gloo"},
        ideal_ms_per_step=ideal_ms,
        timelines=timelines,
        config=config,
        seed=int(params["seed"]),
        versions=describe_versions(),
        command=command,
        date=utc_now(),
        notes=[f"Data: {data}.", *_notes(rounds, arms, followed)],
    )


def arm_result(name: str, steps: Sequence[ArmStep]) -> ArmResult:
    """The record of one arm."""
    by_rank = [step.ranks for step in steps]
    waits = [[rank.wait_ms for rank in ranks] for ranks in by_rank]
    known = [[ms for ms in row if ms is not None] for row in waits]
    return ArmResult.measure(
        arm=name,
        ms_per_step=[step.ms for step in steps],
        loss=[step.outcome.loss for step in steps],
        grad_norm=[step.outcome.grad_norm for step in steps],
        tokens=[step.outcome.tokens for step in steps],
        microbatches=[step.outcome.counts for step in steps],
        busy_ms=[[rank.busy_ms for rank in ranks] for ranks in by_rank],
        warmup_steps=warmup_rounds(len(steps)),
        skipped_steps=[number for number, step in enumerate(steps) if step.outcome.skipped],
        phases=ArmPhases(
            compute_ms=[[sum(rank.microbatch_ms) for rank in ranks] for ranks in by_rank],
            communication_ms=[[rank.communication_ms for rank in ranks] for ranks in by_rank],
            wait_ms=known if known == waits else None,
            optimizer_ms=[[rank.optimizer_ms for rank in ranks] for ranks in by_rank],
        ),
        microbatch_ms=[[rank.microbatch_ms for rank in ranks] for ranks in by_rank],
    )


def check_ideal(rounds: Sequence[Round], followed: str) -> float:
    """The largest relative difference of ``ideal``'s loss from that of the arm it follows."""
    pairs = [(step.ideal.loss, step.arms[followed].outcome.loss) for step in rounds if step.ideal is not None]
    return max((abs(loss - expected) / abs(expected) for loss, expected in pairs if expected), default=0.0)


def _notes(rounds: Sequence[Round], arms: Sequence[Arm], followed: str) -> list[str]:
    notes = [
        "Every minibatch was run by all arms and by ideal in turn, in an order that rotates from step to step; all ranks start a step "
        "together. Planning and packing are ready before and not part of a step.",
        f"ideal had the weights of {followed}, copied outside the measured time; its loss agrees with that arm's to "
        f"{check_ideal(rounds, followed):.1e} relative.",
        *(_ON_GPUS if arms[0].on_gpu else _ON_CPUS),
    ]
    engine = next((arm.engine for arm in arms if arm.engine is not None), None)
    if engine is not None:
        choices, added = engine.choices, sum(engine.memory.values()) / 2**20
        notes.append(
            f"On demand: transport {choices.transport}, accumulate {choices.accumulate}, parameters {choices.parameters}; the engine adds "
            f"{added:.0f} MiB a rank."
        )
        if choices.nodes > 1:
            moved = engine.totals()
            across, all_of_it = moved["bytes_across_nodes"], moved["bytes_gathered"] + moved["bytes_reduced"]
            notes.append(
                f"The ranks were taken for {choices.nodes} nodes (odc.ranks_per_node): in one of the on-demand arms rank 0 put "
                f"{across / 1e6:.1f} MB into other nodes, over the whole comparison, and moved {(all_of_it - across) / 1e6:.1f} MB inside "
                "its own."
            )
        if choices.parameters == "resident":
            notes.append(
                "On-demand arms kept all parameters unsharded within the minibatch and nccl_pad did not; nccl_zero2 (--arms) is the arm on "
                "collectives with the same memory."
            )
    return notes
