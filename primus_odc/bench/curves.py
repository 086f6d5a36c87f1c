"""``primus-odc bench curves``: loss curves of all arms on the same samples, assigned to ranks and microbatches in several ways.

In bf16 two runs of the same arm drift apart: other samples in a microbatch and sums in another order round differently, and training
amplifies that. How far is measured by ``nccl_pad`` itself, trained several times on the same minibatches with other assignments of their
samples, which changes nothing but rounding. An arm trains the same thing if none of its curves is further from the nearest of nccl_pad's
than these are from each other. nccl_pad is trained more often than the others: of two arms with three curves each that differ by chance
only, one is outside of the other's spread every sixth time; two curves beside six are so at most every fiftieth.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primus_odc.bench.results import append, identity
from primus_odc.bench.summary import BASELINE
from primus_odc.data.build import build_dataset, build_stream
from primus_odc.errors import OdcError
from primus_odc.experiment import load_experiment
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.compare_job import Job, arm_params
from primus_odc.megatron.compare_rank import tell
from primus_odc.megatron.minibatch import make_minibatch
from primus_odc.megatron.run_options import RunOptions, policy_of, vocabulary_rows
from primus_odc.megatron.train_config import normalise
from primus_odc.planning.assignments import plan_assignment

Curves = Mapping[str, Sequence[Sequence[float]]]
"""Arm -> [assignment][step] loss."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """How far an arm's curves are from nccl_pad's; differences of losses."""

    arm: str
    farthest: float
    """Of any of its curves from the nearest of nccl_pad's, at the step where that is largest."""
    spread: float
    """Largest difference of two of nccl_pad's curves at any step."""
    final: float
    """Mean loss of the last tenth of the steps, over all assignments."""

    @property
    def within(self) -> bool:
        """Whether the arm trains the same thing as far as can be seen."""
        return self.farthest <= self.spread


def judge(curves: Curves) -> list[Verdict]:
    """A verdict for every arm but nccl_pad, whose curves are among ``curves``, two at least."""
    base = curves[BASELINE]
    spread = max(_distance(a, b) for i, a in enumerate(base) for b in base[:i])
    verdicts = []
    for arm, own in curves.items():
        if arm != BASELINE:
            tail = [loss for curve in own for loss in curve[-max(1, len(curve) // 10) :]]
            farthest = max(min(_distance(curve, reference) for reference in base) for curve in own)
            verdicts.append(Verdict(arm=arm, farthest=farthest, spread=spread, final=sum(tail) / len(tail)))
    return verdicts


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def train_curves(job: Job, device: torch.device) -> None:
    """Train nccl_pad once for each of ``job.assignments``, every other arm for the first ``job.of_others``, on this rank; rank 0 adds the
    curves to the file ``job.result``.

    Raises:
        OdcError: an arm is outside of nccl_pad's spread; the curves are written before.
        PlanError: a minibatch has fewer different assignments than ``job`` asks for, so that one curve would count twice.
    """
    experiment = load_experiment(Path(job.config), job.overrides)
    params = normalise(experiment.params)
    options = [RunOptions.of(experiment, arm_params(params, arm)) for arm in job.arms]
    train, max_tokens = options[0].train, options[0].max_tokens
    over_length = options[0].comm.odc.over_length
    dataset = build_dataset(params, "train", workspace=experiment.workspace, max_tokens=max_tokens, over_length=over_length)
    vocab_size = vocabulary_rows(params, train)
    stream = build_stream(dataset, train.global_batch_size, train.seed)
    drawn = [stream.next() for _ in range(job.steps or train.train_iters)]
    counts = {arm: job.assignments if arm == BASELINE else job.of_others for arm in job.arms}
    for option in options:  # that every assignment exists is known before anything is trained
        for indices in drawn:
            lengths = [dataset[int(i)].tokens.size for i in indices]
            plan_assignment(counts[option.comm.arm] - 1, policy_of(option.comm.arm), lengths, job.world_size, max_tokens, option.cost_model)
    mesh = init_device_mesh(device.type, (job.world_size,))
    curves: dict[str, list[list[float]]] = {arm: [] for arm in job.arms}
    for assignment in range(job.assignments):
        for option in (option for option in options if assignment < counts[option.comm.arm]):
            arm = Arm(option.params, option.comm, vocab_size, mesh, device)
            losses: list[float] = []
            with collecting_between_steps() as collect:
                for step, indices in enumerate(drawn):
                    minibatch = make_minibatch(
                        step,
                        [dataset[int(i)] for i in indices],
                        policy=arm.policy,
                        cost_model=option.cost_model,
                        max_tokens=max_tokens,
                        world_size=arm.world_size,
                        rank=arm.rank,
                        device=device,
                        pad_empty_ranks=arm.pad_empty_ranks,
                        assignment=assignment,
                    )
                    outcome = arm.train_step(minibatch)
                    if outcome.loss is not None:
                        losses.append(outcome.loss)
                    collect()
            curves[arm.name].append(losses)
            tell(f"{arm.name}, assignment {assignment + 1} of {counts[arm.name]}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
            arm.close()
            del arm
            gc.collect()
    verdicts = judge(curves)
    if dist.get_rank() == 0:
        parts = {"kind": "curves", "arms": list(job.arms), "world_size": job.world_size, "device": device.type, "command": job.command}
        judged = [{**asdict(verdict), "within": verdict.within} for verdict in verdicts]
        append(Path(job.result), identity(None), {**parts, "config": params, "losses": curves, "verdicts": judged})
    for verdict in verdicts:
        tell(describe(verdict))
    if outside := [verdict.arm for verdict in verdicts if not verdict.within]:
        raise OdcError(f"the losses of {', '.join(outside)} leave the spread of {BASELINE}'s curves: they train something else")


def describe(verdict: Verdict) -> str:
    """One line."""
    word = "within" if verdict.within else "OUTSIDE OF"
    return (
        f"{verdict.arm}: at most {verdict.farthest:.2e} from {BASELINE}, {word} its spread of {verdict.spread:.2e}; "
        f"loss at the end {verdict.final:.4f}"
    )
