"""The command line: ``primus-odc train | compare | plan | traffic | bench | doctor``.

Each command's arguments and work come from the part that does it, imported when that command is asked for, so that ``plan`` and
``traffic`` run without torch. Words that ``train``, ``compare``, ``plan``, ``doctor`` and ``bench curves`` do not know are overrides of the
experiment YAML, with the meaning Primus gives them (``--lr 1e-4``, ``odc.timeout_s=60``), and are found in ``args.overrides``; the other
commands refuse them (:func:`primus_odc._arguments.take_overrides`). What a user got wrong (an :class:`~primus_odc.errors.OdcError`) is one
message on stderr and exit code 2, Ctrl-C is one and exit code 130; ``--traceback``, in ``args.traceback``, shows where it was raised.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from primus_odc import __version__
from primus_odc.errors import OdcError
from primus_odc.megatron import launcher

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(kw_only=True, slots=True, frozen=True)
class Command:
    """One subcommand: ``module`` holds add_NAME_arguments(parser) and run_NAME(args) -> exit code or None."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command(name="train", module="primus_odc.megatron.command", summary="train an experiment YAML in one arm"),
    Command(name="compare", module="primus_odc.report.command", summary="run the arms in turn and compare them"),
    Command(name="plan", module="primus_odc.planning.command", summary="predict the arms' speed from sample lengths"),
    Command(name="traffic", module="primus_odc.planning.traffic_command", summary="count what crosses between nodes"),
    Command(name="bench", module="primus_odc.bench.command", summary="measure the arms and their transfers"),
    Command(name="doctor", module="primus_odc.doctor.command", summary="check this machine and a YAML before a run"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot write is told by its code, not by a traceback
    words = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in words
    try:
        return _run([word for word in words if word != "--traceback"], traceback)
    except OdcError as error:
        if traceback:
            raise
        tell(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        if traceback:
            raise
        tell_interrupted()
        return EXIT_INTERRUPTED


def tell(error: OdcError, where: str = "") -> None:
    """One message on stderr, and for torchrun, which has the last word."""
    launcher.tell(f"error: {where}{error}")
    launcher.leave_reason(f"{where}{error}")


def tell_interrupted() -> None:
    """One message on stderr; of the ranks of torchrun none, since all are interrupted and their launcher says so."""
    if not launcher.started_by_torchrun():
        launcher.tell(launcher.INTERRUPTED)


def _run(words: list[str], traceback: bool) -> int:
    parser = argparse.ArgumentParser(
        prog="primus-odc",
        description="On-Demand Communication for FSDP2: train, compare, plan, traffic, bench and doctor.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"primus-odc {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    runners: dict[str, Callable[[argparse.Namespace], int | None]] = {}
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=f"{command.summary}.", allow_abbrev=False)
        if command.name == chosen:
            part = importlib.import_module(command.module)
            getattr(part, f"add_{command.name}_arguments")(subparser)
            runners[command.name] = getattr(part, f"run_{command.name}")
    args, unknown = parser.parse_known_args(words)
    if unknown and not getattr(args, "takes_overrides", False):
        kind = f" {args.kind}" if args.command == "bench" else ""
        parser.error(f"{args.command}{kind} does not know: {' '.join(unknown)}")
    args.overrides, args.traceback = unknown, traceback
    return runners[args.command](args) or 0
