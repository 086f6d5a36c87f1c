"""Whole training runs over a small JSONL file, for the tests of trainer and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primus_odc.experiment import Experiment
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


def run(opts: RunOptions) -> Seen:
    """Train as one rank of the process group."""
    seen: Seen = []
    train(opts, CPU, lambda minibatch, outcome: seen.append((minibatch.sample_ids, outcome.loss)))
    return seen
