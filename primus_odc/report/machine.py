"""Facts about the machine and the software for a result: enough to judge a number by, nothing that tells whose machine it is.

No host name, user name or path is read. torch is only asked when the process has already imported it, so that the report works without it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path, PurePath

import primus_odc

PACKAGES = ("torch", "megatron-core", "numpy")
GIT_TIMEOUT_S = 5.0
UNKNOWN = "unknown"


def describe_machine() -> dict[str, object]:
    """CPU model, core count, memory, accelerators, system and thread settings, for ``ComparisonResult.machine``."""
    facts: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["accelerators"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if "OMP_NUM_THREADS" in os.environ:
        facts["omp_num_threads"] = os.environ["OMP_NUM_THREADS"]
    return facts


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages involved that are installed; ``commit``: see :func:`source_commit`, ``unknown`` where git
    cannot tell; ``sources``: :func:`source_digest`, which is that of what runs, whatever git says."""
    versions = {"python": platform.python_version(), "primus_odc": primus_odc.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | {"commit": source_commit() or UNKNOWN, "sources": source_digest()}


def source_commit() -> str | None:
    """The short commit the package's files belong to, with ``+`` where they differ from it; None outside a repository that tracks them."""
    folder = Path(primus_odc.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")


def source_digest() -> str:
    """The first 12 hexadecimal digits of a SHA-256 over names and contents of the package's own Python files: two copies of a tree have the
    same exactly if they would run the same, with ``.git`` or without."""
    folder = Path(primus_odc.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def describe_command(argv: list[str]) -> str:
    """The command line to print: absolute paths reduced to their last part, the program to its name."""
    parts = ["primus-odc", *argv[1:]]
    return " ".join(PurePath(part).name if part.startswith("/") else part for part in parts)


def utc_now() -> str:
    """The time now, ISO 8601 to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no repository, or git refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
