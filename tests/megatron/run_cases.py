"""Whole training runs over a small JSONL file, for the tests of trainer and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from primus_odc._problems import Problems
from primus_odc.experiment import Experiment
from primus_odc.megatron.checkpoint import LATEST, checkpoint_folder
from primus_odc.megatron.lr import build_scheduler
from primus_odc.megatron.outputs import find_output_problems
from primus_odc.megatron.trainer import RunOptions, train
from tests.megatron.arm_cases import ARMS, PARAMS
from tests.megatron.gpt_cases import CPU

Seen = list[tuple[tuple[str, ...], float | None]]
"""(sample ids, loss) of every step."""


def write_dialogues(path: Path, count: int = 23) -> Path:
    """Conversations whose lengths differ."""
    lines = []
    for i in range(count):
        reply = " ".join(f"word{(i * 7 + j) % 11}" for j in range(1 + (i * i) % 6))
        messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": reply}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def options(folder: Path, arm: str, run: str, **changed: Any) -> RunOptions:
    """Nine steps over the dialogues in ``folder``; ``run`` names the run's own folder."""
    params = {
        **PARAMS,
        **ARMS[arm],
        "train_iters": 9,
        "global_batch_size": 5,
        "seq_length": 128,
        "log_interval": 1,
        "distributed_backend": "gloo",
        "sft_dataset_name": str(folder / "dialogues.jsonl"),
        "sft_validation_fraction": 0.2,
        "tokenizer_type": "byte",
        "make_vocab_size_divisible_by": 8,
        **changed,
    }
    experiment = Experiment(
        name=run,
        workspace=folder,
        root=folder / run,
        module_name="post_trainer",
        framework="megatron",
        params=params,
        env={},
        source=folder / "experiment.yaml",
    )
    return RunOptions.of(experiment, params)


def check_outputs(opts: RunOptions, *, thorough: bool = False) -> None:
    """Refuse what keeps a run from continuing and writing, as ``primus-odc train`` does."""
    problems = Problems()
    find_output_problems(problems, opts.experiment, opts.params, opts.comm, opts.train, thorough=thorough)
    problems.raise_any()


def write_checkpoint(folder: Path, step: int, opts: RunOptions) -> Path:
    """A checkpoint of ``opts`` but for its tensors, and for those of a model without parameters."""
    scheduler = build_scheduler(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), opts.params)
    scheduler.step(step)
    source = checkpoint_folder(folder, step)
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=source, no_dist=True)
    position = {"num_samples": 19, "global_batch_size": opts.train.global_batch_size, "seed": opts.train.seed}
    state = {
        "format": 1,
        "step": step,
        "trained_steps": step,
        "arm": opts.comm.arm,
        "world_size": 1,
        "scheduler": scheduler.state_dict(),
        "stream": {**position, "dataset_fingerprint": "of the data", "consumed_samples": step * opts.train.global_batch_size},
        "parameters": {},
    }
    (source / "trainer.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / LATEST).write_text(f"{step}\n", encoding="utf-8")
    return folder


def run(opts: RunOptions) -> Seen:
    """Train as one rank of the process group."""
    seen: Seen = []
    train(opts, CPU, lambda minibatch, outcome: seen.append((minibatch.sample_ids, outcome.loss)))
    return seen
