"""What is installed and set, without importing any of it: Python, primus_odc and its entry point, Primus' variables, other libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import primus_odc
from primus_odc.doctor.finding import Finding, Severity
from primus_odc.doctor.job import Job
from primus_odc.doctor.limits import Check
from primus_odc.primus.refusals import patch_problems

RUN_PYTHONS = ((3, 11), (3, 12))
"""The releases everything was run on; 3.10 and later are allowed."""
ENTRY_POINT = ("torch.backends", "primus_odc")
EXPLICIT_LAUNCH = "launch Primus through primus_odc.primus.launch, as scripts/run_odc.sh does"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def checks(job: Job, environment: Mapping[str, str]) -> list[Check]:
    """All checks of this file."""
    return [
        Check(name="Python", run=check_python),
        Check(name="primus_odc", run=check_primus_odc),
        Check(name="entry point", run=lambda: check_entry_point(job, environment)),
        Check(name="PRIMUS_PATCHES", run=lambda: check_patches(job, environment)),
        Check(name="Primus-Turbo", run=check_turbo),
        Check(name="NVSHMEM, MORI", run=check_shmem),
        Check(name="allocator", run=lambda: check_allocator(environment)),
    ]


def python_version() -> tuple[int, int]:
    """Of this interpreter."""
    return sys.version_info[:2]


def has_module(name: str) -> bool:
    """Whether a top-level module could be imported; it is not."""
    return importlib.util.find_spec(name) is not None


def entry_points() -> list[str]:
    """What torch imports on import, as far as it is ours."""
    group, name = ENTRY_POINT
    return [point.value for point in importlib.metadata.entry_points(group=group) if point.name == name]


def check_python() -> list[Finding]:
    """The interpreter against those that were run."""
    version = python_version()
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    if version < (3, 10):
        return [Finding(check="Python", severity="problem", found=found, setting="use Python 3.10 or later (PYTHON=...)")]
    if version not in RUN_PYTHONS:
        run = " and ".join(f"{major}.{minor}" for major, minor in RUN_PYTHONS)
        return [Finding(check="Python", severity="note", found=f"{found}; run were {run}", setting=f"PYTHON=a Python {run.split()[-1]}")]
    return [Finding(check="Python", severity="ok", found=found)]


def check_primus_odc() -> list[Finding]:
    """This package, and whether the version its metadata tells is the one imported."""
    folder = Path(primus_odc.__file__).parent
    found = f"{primus_odc.__version__} in {folder}"
    try:
        installed = importlib.metadata.version("primus_odc")
    except importlib.metadata.PackageNotFoundError:
        return [
            Finding(
                check="primus_odc",
                severity="note",
                found=f"{found}, not installed: without its metadata torch does not load the plugin into Primus",
                setting="pip install --no-deps . in the checkout, or launch through primus_odc.primus.launch",
            )
        ]
    if installed != primus_odc.__version__:
        setting = "install it again: pip install --no-deps ."
        return [Finding(check="primus_odc", severity="problem", found=f"{found}, but {installed} is installed", setting=setting)]
    return [Finding(check="primus_odc", severity="ok", found=found)]


def check_entry_point(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """How the plugin gets into Primus; the launcher installs it explicitly, so nothing here stops a run."""
    severity: Severity = "note" if job.primus_path else "ok"
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        found = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches entry points off: primus-cli alone runs Primus without the plugin"
        return [Finding(check="entry point", severity=severity, found=found, setting=f"unset it, or {EXPLICIT_LAUNCH}")]
    found_points = entry_points()
    if not found_points:
        return [Finding(check="entry point", severity=severity, found="not installed in this environment", setting=EXPLICIT_LAUNCH)]
    return [Finding(check="entry point", severity="ok", found=f"{' and '.join(found_points)} is imported by torch")]


def check_patches(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Whether PRIMUS_PATCHES switches off what a run in Primus needs."""
    problems = patch_problems(environment)
    if problems:
        severity: Severity = "problem" if job.primus_path else "note"
        return [Finding(check="PRIMUS_PATCHES", severity=severity, found=problem) for problem in problems]
    return [Finding(check="PRIMUS_PATCHES", severity="ok", found=environment.get("PRIMUS_PATCHES") or "not set")]


def check_turbo() -> list[Finding]:
    """Primus-Turbo, which has operators of its own for ODC."""
    found = "installed" if has_module("primus_turbo") else "not installed"
    return [Finding(check="Primus-Turbo", severity="ok", found=f"{found}; none of its ODC operators is needed")]


def check_shmem() -> list[Finding]:
    """Libraries for transports between nodes, and our kernels for them; stage ``run`` says whether they are needed."""
    built = [name for name in ("nvshmem", "mori") if has_module(f"primus_odc.symmetric.shmem._{name}")]
    found = f"MORI is {'' if has_module('mori') else 'not '}installed; kernels for {' and '.join(built) or 'neither'} are built"
    return [Finding(check="NVSHMEM, MORI", severity="ok", found=f"{found} (PRIMUS_ODC_BUILD, needed between nodes only)")]


def check_allocator(environment: Mapping[str, str]) -> list[Finding]:
    """Expandable segments, whose memory other processes cannot map in the usual way; arenas lie beside torch's caching allocator. On
    GPUs train, compare and bench set them by themselves."""
    expandable = [key for key in ALLOCATORS if "expandable_segments:true" in environment.get(key, "").lower()]
    if expandable:
        return [
            Finding(
                check="allocator",
                severity="note",
                found=f"{' and '.join(expandable)} asks for expandable segments, which ran beside the engine's arenas on NVIDIA GPUs only",
                setting="expandable_segments:False where the start-up fails",
            )
        ]
    return [Finding(check="allocator", severity="ok", found="no expandable segments")]
