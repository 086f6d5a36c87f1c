"""What every rank of a comparison does, from the experiment file to the result."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc.data.build import build_dataset, build_stream
from primus_odc.errors import VerificationError
from primus_odc.experiment import load_experiment
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.compare_job import Job, arm_params
from primus_odc.megatron.compare_result import build_result, check_ideal, timeline_step
from primus_odc.megatron.device_rounds import predict_compute
from primus_odc.megatron.ideal import Ideal
from primus_odc.megatron.round_records import Round
from primus_odc.megatron.rounds import MinibatchMaker, Rounds
from primus_odc.megatron.run_options import RunOptions, vocabulary_rows
from primus_odc.megatron.train_config import normalise
from primus_odc.report.wording import AGREEMENT_BOUND


def compare(job: Job, device: torch.device) -> None:
    """Run the whole comparison on this rank and its ``device``; torch.distributed is initialised."""
    tell("preparing data and models")
    experiment = load_experiment(Path(job.config), job.overrides)
    params = normalise(experiment.params)
    options = [RunOptions.of(experiment, arm_params(params, arm)) for arm in job.arms]
    train, max_tokens, cost_model = options[0].train, options[0].max_tokens, options[0].cost_model
    over_length = options[0].comm.odc.over_length
    dataset = build_dataset(params, "train", workspace=experiment.workspace, max_tokens=max_tokens, over_length=over_length)
    vocab_size = vocabulary_rows(params, train)
    stream = build_stream(dataset, train.global_batch_size, train.seed)
    mesh = init_device_mesh(device.type, (job.world_size,))
    arms = [Arm(option.params, option.comm, vocab_size, mesh, device) for option in options]
    followed = next((arm for arm in arms if arm.name == "odc_nopad"), arms[0])
    ideal = Ideal(followed, params, vocab_size, device)
    maker = MinibatchMaker(dataset=dataset, cost_model=cost_model, max_tokens=max_tokens, device=device)

    rounds: list[Round] = []
    drawn = []
    steps = job.steps or train.train_iters
    with collecting_between_steps() as collect:
        running = Rounds(arms, ideal, maker, collect)
        for step in range(steps):
            drawn.append(stream.next())
            rounds.append(running.run(step, drawn[-1]))
            tell(progress(step, steps, rounds[-1]))
        if device.type != "cpu":
            rounds = predict_compute(rounds)
        shown = timeline_step(rounds)
        tell(f"minibatch {shown + 1} once more in every arm, for the timeline")
        timelines = running.timelines(shown, drawn[shown])
    if not params.get("bf16", False) and (difference := check_ideal(rounds, followed.name)) > AGREEMENT_BOUND:
        raise VerificationError(f"ideal does not follow {followed.name}: their losses differ by up to {difference:.1e} relative")
    if dist.get_rank() == 0:
        build_result(
            rounds, timelines, arms, params, max_tokens=max_tokens, data=dataset.summary(), followed=followed.name, command=job.command
        ).write(Path(job.result))
    for arm in arms:
        arm.close()


def progress(step: int, steps: int, done: Round) -> str:
    """One line about a round."""
    times = [f"{name} {arm.ms:.0f}" for name, arm in done.arms.items()]
    if done.ideal is not None:
        times.append(f"ideal {done.ideal.ms:.0f}")
    loss = next(iter(done.arms.values())).outcome.loss
    return f"step {step + 1:>{len(str(steps))}}/{steps}  ms: {', '.join(times)}  loss {'skipped' if loss is None else f'{loss:.4f}'}"


def tell(line: str) -> None:
    """Rank 0 reports progress: a line on standard output."""
    if dist.get_rank() == 0:
        print(line, flush=True)
