"""``primus-odc plan``: what each arm would gain, before any accelerator is paid for.

Lengths come from a named distribution, from a file of lengths, or from an experiment YAML, whose data are read as training reads them.
Only the last needs what lies above this package (:mod:`primus_odc.megatron.planned`), and imports it when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from primus_odc._arguments import positive, seed, take_overrides
from primus_odc.config import OdcConfig
from primus_odc.errors import PlanError
from primus_odc.planning.cost import CostModel
from primus_odc.planning.lengths import DISTRIBUTIONS, named_distribution, read_lengths
from primus_odc.planning.report import PlanSettings, plan_report, render

BATCH_SIZES = (1, 2, 4, 8)
_MOST_DRAWN = 10**8


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``primus-odc plan``."""
    names = ", ".join(DISTRIBUTIONS)
    parser.add_argument(
        "lengths",
        help=f"file of tokens per sample (text, .json, .jsonl), or one of {names}, optionally with /64, or an experiment YAML, whose data "
        "are read as training reads them, and whose batch size, cap and costs count where no option changes them",
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[8], metavar="N", help="numbers of ranks (default: 8)")
    parser.add_argument(
        "--samples-per-rank", type=positive, nargs="+", metavar="N", help="batch sizes (default: 1 2 4 8, or the YAML's global_batch_size)"
    )
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="max_tokens_per_microbatch (default: the longest a sample can be, or the YAML's)"
    )
    parser.add_argument(
        "--cost-model",
        help="linear, attention, or your own fit a,b (default: attention, or the YAML's; training plans with odc.cost_model, by default "
        f"{OdcConfig().cost_model})",
    )
    parser.add_argument(
        "--microbatch-cost",
        type=float,
        metavar="TOKENS",
        help="fixed cost of a microbatch, odc.microbatch_cost (default: 0, or the YAML's)",
    )
    parser.add_argument("--minibatches", type=positive, default=16, metavar="N", help="minibatches to average over (default: 16)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the distribution and of the order (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON with every step instead of the tables")
    take_overrides(parser)


def run_plan(args: argparse.Namespace) -> int:
    """Print the report, for a YAML with the overrides ``args.overrides``; returns the exit code.

    Raises:
        PlanError: lengths that cannot be read, a sample over the cap, too few samples, a wrong cost model, overrides without a YAML.
        OdcError: an experiment or its data that cannot be used.
    """
    of_experiment = args.lengths.endswith((".yaml", ".yml"))
    if args.overrides and not of_experiment:
        raise PlanError(f"plan does not know {' '.join(args.overrides)}; keys are overridden after a YAML: plan YAML --key value")
    lengths, settings = _from_experiment(args) if of_experiment else _from_lengths(args)
    report = plan_report(lengths, settings, source=args.lengths)
    print(json.dumps(report) if args.json else render(report), end="\n" if args.json else "")
    return 0


def _from_lengths(args: argparse.Namespace) -> tuple[npt.NDArray[np.int64], PlanSettings]:
    samples_per_rank = args.samples_per_rank or BATCH_SIZES
    distribution = named_distribution(args.lengths)
    if distribution is not None:
        needed = max(args.ranks) * max(samples_per_rank) * args.minibatches
        if needed > _MOST_DRAWN:
            raise PlanError(
                f"{args.minibatches} minibatches of {max(samples_per_rank)} samples on each of {max(args.ranks)} ranks are {needed} "
                f"lengths, and at most {_MOST_DRAWN} are drawn: give fewer of --minibatches, --samples-per-rank or --ranks"
            )
        lengths = distribution.sample(needed, args.seed)
        longest = distribution.longest // distribution.divisor
    else:
        lengths = read_lengths(args.lengths)
        longest = int(lengths.max())
    if args.max_tokens is not None and args.max_tokens < longest:
        raise PlanError(
            f"--max-tokens {args.max_tokens}: samples have up to {longest} tokens; give at least that, or cut the lengths first (training "
            "does so with odc.over_length: truncate)"
        )
    return lengths, PlanSettings(
        world_sizes=args.ranks,
        samples_per_rank=samples_per_rank,
        max_tokens=args.max_tokens if args.max_tokens is not None else longest,
        cost_model=_cost_model(args.cost_model or "attention", args.microbatch_cost or 0.0),
        minibatches=args.minibatches,
        seed=args.seed,
    )


def _from_experiment(args: argparse.Namespace) -> tuple[npt.NDArray[np.int64], PlanSettings]:
    """With overrides and options as what they are for training: other values of its keys; of both for one key the option counts."""
    keys = {
        "max_tokens_per_microbatch": args.max_tokens,
        "cost_model": f"[{args.cost_model.strip('[]')}]" if args.cost_model and "," in args.cost_model else args.cost_model,
        "microbatch_cost": args.microbatch_cost,
    }
    overrides = args.overrides + [f"odc.{key}={value}" for key, value in keys.items() if value is not None]
    planned = importlib.import_module("primus_odc.megatron.planned").read_planned(Path(args.lengths), overrides)
    return planned.lengths, PlanSettings(
        world_sizes=args.ranks,
        samples_per_rank=args.samples_per_rank or (),
        global_batch_size=None if args.samples_per_rank else planned.global_batch_size,
        max_tokens=planned.max_tokens,
        cost_model=planned.cost_model,
        cost_model_source="--cost-model" if args.cost_model else "odc.cost_model",
        minibatches=args.minibatches,
        seed=args.seed,
    )


def _cost_model(text: str, microbatch_cost: float) -> CostModel:
    if "," not in text:
        return CostModel.from_config(text, microbatch_cost=microbatch_cost)
    try:
        coefficients = [float(word) for word in text.strip("[]").split(",")]
    except ValueError as error:
        raise PlanError(f"--cost-model is {text!r}; use linear, attention or two coefficients a,b") from error
    return CostModel.from_config(coefficients, microbatch_cost=microbatch_cost)
