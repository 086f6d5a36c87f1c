"""``primus-odc compare``: run the arms (or read two finished runs) and write ``result.json``, a table and ``index.html``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from primus_odc._arguments import repeated, take_overrides
from primus_odc._config_values import nearest
from primus_odc._locks import lock_folder, unwritable
from primus_odc.errors import ConfigError
from primus_odc.megatron.launcher import tell
from primus_odc.report.agreement import disagreements
from primus_odc.report.html import write_page
from primus_odc.report.logs import compare_logs, log_path
from primus_odc.report.machine import describe_command
from primus_odc.report.result import ComparisonResult
from primus_odc.report.table import render_table

ARMS = ("nccl_pad", "nccl_localsort", "nccl_zero2", "odc_pad", "odc_nopad")
DEFAULT_OUTPUT = Path("output/compare")
FROM_LOGS_OUTPUT = Path("output/compare_logs")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``compare``."""
    parser.add_argument("config", nargs="?", type=Path, help="experiment YAML to run the arms of")
    parser.add_argument(
        "--from-logs", nargs=2, type=Path, metavar=("A", "B"), help="compare two finished runs: their folders or steps.jsonl files"
    )
    where = f"where to write (default: {DEFAULT_OUTPUT}, {FROM_LOGS_OUTPUT} with --from-logs)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    parser.add_argument("--arms", metavar="LIST", help=f"comma-separated, of {', '.join(ARMS)} (default: nccl_pad,odc_pad,odc_nopad)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of every arm (default: train_iters of the experiment)")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks on this host (default: the smaller of cores and 4)")
    take_overrides(parser)


def run_compare(args: argparse.Namespace) -> int:
    """Does what the options say, prints the table and returns the exit status: 1 where the arms did not train the same thing.

    Args:
        args: parsed options of :func:`add_compare_arguments`, and in ``overrides`` the words that change the experiment.

    Raises:
        ConfigError: options that do not go together; all at once.
        DataError: another comparison is writing into the folder, or the two logs cannot be read or compared.
    """
    arms = tuple(arm.strip() for arm in args.arms.split(",")) if args.arms is not None else ("nccl_pad", "odc_pad", "odc_nopad")
    problems = option_problems(args, arms)
    if problems:
        raise ConfigError(problems)
    output: Path = args.output or (DEFAULT_OUTPUT if args.from_logs is None else FROM_LOGS_OUTPUT)
    with ExitStack() as held:
        result = _result(args, arms, hold=lambda: held.enter_context(lock_folder(output, "--output", busy=_busy(output))))
        write_report(result, output)
    sys.stdout.write(render_table(result))
    sys.stdout.write(f"\nwritten: {output / 'result.json'}, {output / 'index.html'}\n")
    # Finished runs may differ on purpose, in their learning rates for instance; arms run side by side may not.
    problems = disagreements(result) if args.from_logs is None else []
    for problem in problems:
        tell(f"error: {problem}")
    return 1 if problems else 0


def _result(args: argparse.Namespace, arms: Sequence[str], hold: Callable[[], object]) -> ComparisonResult:
    """What is to be written, with the folder for it held: once all is checked, and before the arms run, so that the second of two does
    not lose its work."""
    command = describe_command(sys.argv)
    if args.from_logs is not None:
        run_a, run_b = args.from_logs
        result = compare_logs(run_a, run_b, command=command)
        hold()
        return result
    # The arms need torch and megatron-core; a comparison of logs needs neither.
    run_job = importlib.import_module("primus_odc.megatron.compare").run_job
    options = {"overrides": args.overrides, "arms": arms, "steps": args.steps, "nproc": args.nproc, "command": command}
    with tempfile.TemporaryDirectory(prefix="primus-odc-") as folder:
        file = Path(folder) / "result.json"
        run_job(args.config, **options, result=file, before_start=hold)
        return ComparisonResult.read(file)


def _busy(output: Path) -> str:
    return f"--output: a run that is still going on writes into {output}; choose another folder with --output, or wait for its end"


def write_report(result: ComparisonResult, output: Path) -> None:
    """Writes ``result.json`` and ``index.html`` into the folder, which is made when missing."""
    result.write(output / "result.json")
    write_page(result, output / "index.html")


def option_problems(args: argparse.Namespace, arms: Sequence[str]) -> list[str]:
    """One sentence for each option that cannot be followed."""
    problems = []
    unknown = [arm for arm in arms if arm not in ARMS]
    if args.from_logs is not None:
        given: dict[str, object] = {
            "a config": args.config,
            "--arms": args.arms,
            "--steps": args.steps,
            "--nproc": args.nproc,
            f"an override ({' '.join(args.overrides)})": args.overrides or None,
        }
        problems += [
            f"--from-logs reads finished runs, {name} has no meaning with it" for name, value in given.items() if value is not None
        ]
        run_a, run_b = args.from_logs
        if os.path.realpath(log_path(run_a)) == os.path.realpath(log_path(run_b)):
            problems.append(f"--from-logs: {run_a} and {run_b} are the same run; give the folders of two")
    elif args.config is None:
        problems.append("compare needs an experiment YAML to run the arms of, or --from-logs A B")
    problems += [f"--arms: {arm!r} is not known, did you mean {nearest(arm, ARMS)!r}? allowed: {', '.join(ARMS)}" for arm in unknown]
    problems += repeated("--arms", arms)
    if len(set(arms)) < 2 and not unknown:
        other = arms[0] if arms[0] != "nccl_pad" else "odc_nopad"
        problems.append(f"--arms: {arms[0]} alone leaves nothing to compare; name at least two, separated by commas, as nccl_pad,{other}")
    if args.output is not None:
        problems += unwritable("--output", args.output)
    problems += [
        f"{name}: must be at least 1, got {value}"
        for name, value in (("--steps", args.steps), ("--nproc", args.nproc))
        if value is not None and value < 1
    ]
    return problems
