"""Checks of the checkout that no linter makes: `checks.py source`, `checks.py wheel FILE`, `checks.py result FILE --steps N --ranks N`.

Standard library only, so that it runs with any Python. Every check returns the list of what it found wrong; an empty list is success.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
SOURCE_SUFFIXES = {".py", ".sh", ".cpp", ".cu", ".hip", ".h", ".hpp", ".cmake"}
# A path that exists on one machine only: somebody's home or workspace folder.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|home|root|Users)/\w+")
# torch's functions that make a tensor where torch.set_default_device() says, unless they are told a device.
TENSOR_MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
ARMS = ("nccl_pad", "odc_pad", "odc_nopad")
LOSS_TOLERANCE = 1e-5


def tracked_files() -> list[Path]:
    """The files that git tracks, relative to the root; those deleted in the working tree are left out."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True, timeout=60).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]


def check_source(files: Iterable[Path]) -> list[str]:
    """No source file past the length limit, no path of one machine in any text file, no tensor of the package's on no device of its own."""
    problems = []
    for file in files:
        try:
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        if len(lines) > MAX_LINES and (file.suffix in SOURCE_SUFFIXES or lines[0].startswith("#!")):
            problems.append(f"{file}: {len(lines)} lines, at most {MAX_LINES} are allowed: split it")
        problems += [f"{file}:{n}: machine path {found[0]}" for n, line in enumerate(lines, 1) if (found := MACHINE_PATH.search(line))]
        if file.suffix == ".py" and file.parts[0] == "primus_odc":
            problems += check_devices(file, "\n".join(lines))
    return problems


def check_devices(file: Path, source: str) -> list[str]:
    """Every tensor made has its device named: a script's ``torch.set_default_device("cuda")`` else moves what has to be in host memory."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [
        f"{file}:{call.lineno}: torch.{call.func.attr}() without device="
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in TENSOR_MAKERS
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def check_wheel(wheel: Path, files: Iterable[Path]) -> list[str]:
    """A pure wheel that has every tracked file of the package, nothing else beside its metadata, and the console script."""
    problems = []
    if not wheel.name.endswith("-py3-none-any.whl"):
        problems.append(f"{wheel.name}: not a pure wheel (py3-none-any)")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = "".join(archive.read(name).decode() for name in packed if name.endswith(".dist-info/entry_points.txt"))
    expected = {file.as_posix() for file in files if file.parts[0] == "primus_odc"}
    problems += [f"{wheel.name}: lacks {name}" for name in sorted(expected - packed)]
    stray = (name for name in packed - expected if ".dist-info/" not in name and not name.startswith("primus_odc/"))
    problems += [f"{wheel.name}: stray {name}" for name in sorted(stray)]
    if not re.search(r"^primus-odc\s*=\s*primus_odc\.cli:main$", entry_points, re.MULTILINE):
        problems.append(f"{wheel.name}: no console script primus-odc")
    return problems


def check_result(result: dict[str, Any], steps: int, ranks: int) -> list[str]:
    """A comparison's result.json: all arms, every series complete and finite, losses equal over the arms, counts as each arm promises."""
    arms = {arm["arm"]: arm for arm in result["arms"]}
    missing = [name for name in ARMS if name not in arms]
    if missing:
        return [f"no arm {', '.join(missing)}: only {', '.join(arms) or 'none'}"]
    problems = []
    for name, arm in arms.items():
        for key in ("loss", "grad_norm", "ms_per_step"):
            if len(arm[key]) != steps or not all(math.isfinite(value) for value in arm[key]):
                problems.append(f"{name}.{key}: expected {steps} finite numbers, got {arm[key]}")
        if not (math.isfinite(arm["tokens_per_s"]) and arm["tokens_per_s"] > 0):
            problems.append(f"{name}.tokens_per_s: {arm['tokens_per_s']}")
        if len(arm["idle_fraction"]) != ranks or not all(0 <= value <= 1 for value in arm["idle_fraction"]):
            problems.append(f"{name}.idle_fraction: expected {ranks} numbers from 0 to 1, got {arm['idle_fraction']}")
        counts = arm["microbatches"]
        if len(counts) != steps or any(len(step) != ranks or min(step) < 0 or sum(step) == 0 for step in counts):
            problems.append(f"{name}.microbatches: expected {steps} steps of {ranks} counts, got {counts}")
        elif name != "odc_nopad" and any(len(set(step)) != 1 for step in counts):
            problems.append(f"{name}.microbatches: this arm has equal counts on all ranks, got {counts}")
    if problems:
        return problems

    reference = arms["nccl_pad"]["loss"]
    for name, arm in arms.items():
        for step, (loss, expected) in enumerate(zip(arm["loss"], reference, strict=True)):
            if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
                problems.append(f"{name}.loss[{step}]: {loss!r}, but nccl_pad has {expected!r} (allowed: {LOSS_TOLERANCE:g} relative)")
    if arms["odc_pad"]["microbatches"] != arms["nccl_pad"]["microbatches"]:
        problems.append("odc_pad and nccl_pad run the very same plan, but their microbatch counts differ")
    for name in ("odc_pad", "odc_nopad"):
        if not result["speedup"].get(name, 0) > 0:
            problems.append(f"speedup.{name}: {result['speedup'].get(name)}")
    if not result["ideal_ms"] > 0:
        problems.append(f"ideal_ms: {result['ideal_ms']}")
    return problems


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("source", help="file lengths, machine paths")
    wheel = commands.add_parser("wheel", help="contents of a built wheel")
    wheel.add_argument("file", type=Path)
    result = commands.add_parser("result", help="a comparison's result.json")
    result.add_argument("file", type=Path)
    result.add_argument("--steps", type=int, required=True)
    result.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args(arguments)
    checks: dict[str, Callable[[], list[str]]] = {
        "source": lambda: check_source(tracked_files()),
        "wheel": lambda: check_wheel(options.file, tracked_files()),
        "result": lambda: check_result(json.loads(options.file.read_text(encoding="utf-8")), options.steps, options.ranks),
    }
    file: Path | None = getattr(options, "file", None)
    problems = checks[options.command]() if file is None or file.is_file() else [f"{file}: no such file"]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"checks {options.command}: {f'{len(problems)} problem(s)' if problems else 'ok'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
