"""``primus-odc bench primus``: the minibatches of ``bench train``, trained by the real Primus, arm after arm, each in a run of its own.

The folder ``--out`` gets a data file, for each arm the experiment it was, Primus' output and its step log, and ``summary.md``: milliseconds
of a step and speed-ups, beside those that ``bench train`` measured on the same minibatches, where its file is given.

The samples have the lengths that ``bench train`` draws, written in the order in which the plugin's stream gives them out, and the plan has
the same costs, so both run the same microbatches. What else is compared with: every minibatch comes once to warm up and then to be
measured; the learning rate is 0; the model has Megatron's own layers, so neither TransformerEngine nor Apex is needed. Other than in
``bench train`` the training loop, the optimizer, mixed precision and how layers are recomputed are Primus'.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import primus_odc
from primus_odc._arguments import positive, repeated, seed
from primus_odc.bench.beside_bench import Point, render_beside
from primus_odc.bench.job import LENGTHS, SHORTEST, ArmSpec, arm_spec
from primus_odc.bench.lengths import draw_minibatches
from primus_odc.bench.shapes import SHAPES
from primus_odc.bench.summary import BASELINE
from primus_odc.data.stream import epoch_order
from primus_odc.errors import ConfigError
from primus_odc.megatron.launcher import tell
from primus_odc.planning.cost import ATTENTION_TOKENS, CostModel
from primus_odc.report.logs import StepLog, read_step_log

PRESETS = Path(primus_odc.__file__).parent / "primus" / "presets"
ARMS = (BASELINE, "odc_nopad", "odc_nopad:resident", "odc_pad")
SEED = 1234  # of Primus' run; the lengths have a seed of their own
PASSES = 2
_MARKERS = 2  # the byte tokenizer's begin and end
_TAIL_LINES = 30
_GRACE_S = 20.0

# Megatron's own layers, without TransformerEngine and Apex.
_LOCAL = {
    "transformer_impl": "local",
    "use_flash_attn": False,
    "apply_rope_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "moe_permute_fusion": False,
    "no_persist_layer_norm": True,
}
_RUN = {
    "sft_conversation_format": "text",
    "tokenizer_type": "byte",
    "num_workers": 0,
    "lr": 0.0,
    "min_lr": 0.0,
    "lr_warmup_iters": 0,
    "lr_decay_style": "constant",
    "eval_iters": 0,
    "save": None,
    "log_interval": 1,
    "seed": SEED,
    "enable_gloo_process_groups": False,
    "use_rocm_mem_info_iters": [],
}
# Unless they are set: dynamo would compile a few small functions of Megatron's in every run; fused AdamW is what Apex and
# TransformerEngine bring, and this switch of Primus' takes torch's.
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "PRIMUS_TORCH_OPTIM": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(kw_only=True, slots=True, frozen=True)
class InPrimus:
    """What is run."""

    primus: Path
    megatron: Path
    script: Path | None
    """Started instead of the plugin's launcher, with the same words."""
    folder: Path
    arms: tuple[ArmSpec, ...]
    point: Point
    timeout_s: float

    @property
    def global_batch(self) -> int:
        """Samples of a minibatch."""
        return self.point.samples_per_rank * self.point.world_size

    def write_samples(self) -> Path:
        """Write the data file: every minibatch once for each pass."""
        point, divisor = self.point, SHAPES[self.point.shape].length_divisor
        drawn = draw_minibatches(
            point.lengths, self.global_batch, point.minibatches, point.cap, point.seed, point.samples_per_rank, divisor
        )
        lengths = [length for minibatch in drawn for length in minibatch] * PASSES
        lines = [""] * len(lengths)
        generator = np.random.default_rng(point.seed)
        for place, length in zip(epoch_order(len(lengths), SEED, 0), lengths, strict=True):
            letters = generator.integers(ord("a"), ord("z") + 1, length - _MARKERS, dtype=np.uint8)
            lines[place] = json.dumps({"text": letters.tobytes().decode()}) + "\n"
        path = self.folder / "samples.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        return path

    def experiment(self, arm: ArmSpec, data: Path) -> dict[str, Any]:
        """An experiment of Primus' for one arm."""
        point = self.point
        shape = SHAPES[point.shape].with_layers(point.layers)
        overrides = {
            **shape.params,
            **_LOCAL,
            **_RUN,
            "seq_length": point.cap,
            "max_position_embeddings": point.cap,
            # A vocabulary of the shape's size, of which the byte tokenizer uses the beginning.
            "make_vocab_size_divisible_by": shape.vocab_size,
            "sft_dataset_name": str(data),
            "train_iters": PASSES * point.minibatches,
            "global_batch_size": self.global_batch,
            "distributed_backend": "nccl" if point.device == "cuda" else "gloo",
            "odc": {**plan_keys(shape.cost_model(point.fixed_tokens)), "timeout_s": self.timeout_s, **dict(arm.options or ())},
        }
        module = {"framework": "megatron", "config": "sft_trainer.yaml", "model": "qwen2.5_base.yaml", "overrides": overrides}
        return {
            "extends": [str(PRESETS / f"sft_{arm.name.partition(':')[0]}.yaml")],
            "work_group": "primus_odc",
            "user_name": "bench",
            "exp_name": file_name(arm),
            "workspace": str(self.folder / "runs"),
            "modules": {"post_trainer": module},
        }

    def run(self, arm: ArmSpec, data: Path) -> StepLog:
        """Train one arm and read its log.

        Raises:
            ConfigError: the run failed or lasted too long; the message holds the end of its output.
        """
        config, output = self.folder / f"{file_name(arm)}.yaml", self.folder / f"{file_name(arm)}.log"
        config.write_text(yaml.safe_dump(self.experiment(arm, data), sort_keys=False), encoding="utf-8")
        start = [str(self.script)] if self.script is not None else ["-m", "primus_odc.primus.launch"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(self.point.world_size), *start, "train", "posttrain", "--config", str(config)]
        paths = {"PRIMUS_PATH": str(self.primus), "BACKEND_PATH": str(self.megatron), "PRIMUS_ODC_PRESETS": str(PRESETS)}
        with output.open("w", encoding="utf-8") as log:
            environment = {**_ENVIRONMENT, **os.environ, **paths}
            job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | str = job.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                status = f"none after {self.timeout_s:g} s"
            finally:
                _end(job)
        if status != 0:
            tail = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            raise ConfigError([f"{arm.name} in Primus: exit status {status}; all of its output is in {output}, which ends:\n{tail}"])
        return read_step_log(self.folder / "runs" / "primus_odc" / "bench" / file_name(arm))


def _end(job: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks, if it runs."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def file_name(arm: ArmSpec) -> str:
    """``odc_nopad-resident``."""
    return arm.name.replace(":", "-").replace("+", "-")


def plan_keys(costs: CostModel) -> dict[str, Any]:
    """``odc`` keys that plan with these costs."""
    coefficients = [costs.per_token_squared * ATTENTION_TOKENS**2, costs.per_token * ATTENTION_TOKENS]
    return {"cost_model": [value / coefficients[1] for value in coefficients], "microbatch_cost": costs.fixed_tokens}


def add_primus_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``primus-odc bench primus``."""
    for name, variable, what in (
        ("--primus", "PRIMUS_PATH", "checkout of AMD-AGI/Primus"),
        ("--megatron", "MEGATRON_PATH", "checkout of Megatron-LM at the commit it pins"),
    ):
        given = os.environ.get(variable)
        parser.add_argument(name, type=Path, metavar="DIR", default=given, required=not given, help=f"{what} (default: {variable})")
    parser.add_argument("--script", type=Path, metavar="FILE.py", help="start this instead of primus_odc.primus.launch, with its words")
    parser.add_argument("--samples-per-rank", type=positive, default=2, metavar="N", help="of a minibatch (default: 2)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--cap", type=positive, default=32768, metavar="TOKENS", help="of a microbatch (default: 32768)")
    parser.add_argument("--minibatches", type=positive, default=6, metavar="N", help="each twice, the first time to warm up (default: 6)")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2-1.5b")
    parser.add_argument("--layers", type=positive, metavar="N", help="instead of the shape's own number")
    parser.add_argument("--seed", type=seed, default=0, help="of the lengths (default: 0)")
    parser.add_argument("--fixed-tokens", type=float, default=128.0, metavar="N", help="as of bench train (default: 128)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="for one arm, and for a silent peer (default: 600)")
    parser.add_argument("--beside", type=Path, metavar="FILE.json", help="of bench train, with the same samples, cap, seed and minibatches")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder that does not exist or is empty")


def run_in_primus(args: argparse.Namespace) -> int:
    """Train all arms; returns 0, or 1 if one of them failed. Without the baseline the others are left out, else run and told all the same.

    Raises:
        ConfigError: arguments that cannot be.
    """
    job = InPrimus(
        primus=args.primus.resolve(),
        megatron=args.megatron.resolve(),
        script=args.script.resolve() if args.script is not None else None,
        folder=args.out.resolve(),
        arms=tuple(arm_spec(name) for name in args.arms),
        point=Point(
            shape=args.shape,
            layers=args.layers,
            lengths=LENGTHS[0],
            samples_per_rank=args.samples_per_rank,
            cap=args.cap // SHAPES[args.shape].length_divisor,
            minibatches=args.minibatches,
            seed=args.seed,
            fixed_tokens=args.fixed_tokens,
            world_size=args.nproc,
            device=args.device,
        ),
        timeout_s=args.timeout_s,
    )
    _check(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    data, summary = job.write_samples(), job.folder / "summary.md"
    logs: dict[str, StepLog] = {}
    failures: list[str] = []
    for arm in job.arms:
        begin = time.monotonic()
        try:
            logs[arm.name] = job.run(arm, data)
        except ConfigError as error:
            failures += error.problems
        print(f"{arm.name} in Primus: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if arm.name == BASELINE and failures:
            break  # nothing to compare with
        summary.write_text(render_beside(logs, job.point, args.beside), encoding="utf-8")
    if summary.exists():
        print(summary.read_text(encoding="utf-8"))
    for failure in failures:
        tell(f"error: {failure}")
    return 1 if failures else 0


def _check(job: InPrimus) -> None:
    problems = []
    if not (job.primus / "primus" / "cli" / "main.py").is_file():
        problems.append(f"--primus {job.primus} is no checkout of Primus")
    if not (job.megatron / "megatron" / "training").is_dir():
        problems.append(f"--megatron {job.megatron} is no checkout of Megatron-LM")
    if job.script is not None and not job.script.is_file():
        problems.append(f"--script {job.script} is no file")
    problems += repeated("--arms", (arm.name for arm in job.arms))
    problems += [f"--arms {arm.name}: Primus trains {', '.join(ARMS)}" for arm in job.arms if not _known(arm)]
    if job.folder.exists() and (not job.folder.is_dir() or any(job.folder.iterdir())):
        problems.append(f"--out {job.folder} is there already and not an empty folder")
    if job.point.cap < SHORTEST:
        divisor = SHAPES[job.point.shape].length_divisor
        problems.append(f"--cap: below {SHORTEST * divisor} tokens no sample of --shape {job.point.shape} has one to predict")
    if problems:
        raise ConfigError(problems)


def _known(arm: ArmSpec) -> bool:
    return arm.name == BASELINE or arm.options is not None
