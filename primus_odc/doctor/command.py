"""``primus-odc doctor [YAML]``: run all checks, print what was found, and say by the exit code whether a run can start."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path

from primus_odc._arguments import take_overrides
from primus_odc.doctor import launch, network, software, system
from primus_odc.doctor.child import run_stages
from primus_odc.doctor.finding import Finding, as_json, table, unique
from primus_odc.doctor.job import Job
from primus_odc.doctor.limits import start
from primus_odc.errors import ConfigError
from primus_odc.experiment import env_block

EXIT_PROBLEM = 1
TIME_LIMIT_S = 20.0
"""The limits of single checks are meant for this whole, and grow and shrink with it."""
DEFAULT_LIMIT_S = 60.0
"""The first import of torch and megatron-core took more than 14 s on a fresh machine with local disks."""
_MOST = 10**8


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``primus-odc doctor``."""
    parser.add_argument("config", nargs="?", metavar="YAML", help="the experiment to be trained; none: the machine alone is checked")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print notes and problems only")
    parser.add_argument(
        "--ranks",
        type=_count,
        help="processes of the run (default: WORLD_SIZE, else one for each GPU of each node; without any the smaller of cores and 4)",
    )
    parser.add_argument("--nodes", type=_count, help="nodes (default: NNODES, else 1)")
    parser.add_argument("--time-limit", type=_seconds, default=DEFAULT_LIMIT_S, metavar="SECONDS", help="for everything (default: 60)")
    take_overrides(parser)


def run_doctor(args: argparse.Namespace) -> int:
    """Check the machine and, where ``args.config`` names one, a YAML with the overrides ``args.overrides``.

    With ``PRIMUS_PATH`` set the YAML is judged as Primus would train it, else as the standalone trainer would.

    Returns:
        0 when nothing found would prevent a run, else 1.

    Raises:
        ConfigError: overrides without a YAML.
    """
    if args.config is None and args.overrides:
        raise ConfigError([f"doctor does not know {' '.join(args.overrides)}; keys are overridden after a YAML: doctor YAML --key value"])
    began = time.monotonic()
    job = Job(
        config=args.config,
        overrides=args.overrides,
        ranks=args.ranks,
        nodes=args.nodes or launch.number(os.environ, "NNODES", 1) or 1,  # one that is no number is a finding
        primus_path=os.environ.get("PRIMUS_PATH") or None,
    )
    findings = examine(job, _environment(job), args.time_limit)
    shown = [f for f in findings if f.severity != "ok"] if args.quiet else findings
    if args.json:
        print(as_json(shown, time.monotonic() - began))
    elif shown or not args.quiet:
        print(table(shown))
    return EXIT_PROBLEM if any(f.severity == "problem" for f in findings) else 0


def examine(job: Job, environment: Mapping[str, str], time_limit_s: float) -> list[Finding]:
    """All findings about ``job`` in ``environment``; returns within ``time_limit_s`` and a second or two."""
    deadline = time.monotonic() + time_limit_s
    scale = time_limit_s / TIME_LIMIT_S
    families = (software.checks, system.checks, network.checks, launch.checks)
    wait = start([check for family in families for check in family(job, environment)])
    in_child = run_stages(job, environment, scale, deadline)
    return unique([*wait(scale), *in_child])


def _environment(job: Job) -> dict[str, str]:
    """That of the run: the YAML's ``env`` block comes on top, as both trainers have it."""
    if job.config is None:
        return dict(os.environ)
    try:
        return {**os.environ, **env_block(Path(job.config))}
    except ConfigError:
        return dict(os.environ)  # the stage that reads the YAML tells what is wrong with it


def _count(text: str) -> int:
    value = launch.whole(text, 1, _MOST)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from above 0 to 3600 seconds")
    return value
