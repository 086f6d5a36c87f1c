"""Stage ``packages``: what is really imported, against the tested versions. Runs in the child process: it imports all of it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from primus_odc import versions
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.software import EXPLICIT_LAUNCH
from primus_odc.errors import VersionError
from primus_odc.versions import TestedRange

PLUGIN = "primus_odc.primus.loading"


def check_packages(job: Job) -> list[Finding]:
    """torch with FSDP2's hooks, megatron-core and, where Primus is to train, Primus; each as the run would import it."""
    findings = use_primus(job.primus_path) if job.primus_path else []
    findings.append(_check(versions.TORCH, versions.require_fsdp2, "torch"))
    findings.append(_plugin(job))
    if job.primus_path:
        findings.append(_check(versions.PRIMUS, versions.require_primus, "Primus"))
    megatron = _check(versions.MEGATRON, versions.require_megatron, "megatron-core")
    if job.config is None and not job.primus_path and importlib.util.find_spec("megatron") is None:
        # The engine on a user's own FSDP2 model does without.
        megatron = Finding(check="megatron-core", severity="note", found="not installed", setting=f"pip install '{versions.MEGATRON}'")
    return [*findings, megatron]


def _check(tested: TestedRange, require: Callable[[], None], name: str) -> Finding:
    try:
        require()
    except VersionError as error:
        return Finding(check=name, severity="problem", found=str(error))
    module = sys.modules[tested.module]
    version = str(getattr(module, "__version__", "unknown"))
    return Finding(check=name, severity="ok", found=f"{version} (tested: {tested})", details={"version": version})


def _plugin(job: Job) -> Finding:
    """Whether torch, which this process has just imported, loaded the plugin as it will in Primus."""
    if PLUGIN in sys.modules:
        return Finding(check="plugin", severity="ok", found="loaded by torch")
    return Finding(
        check="plugin",
        severity="note" if job.primus_path else "ok",
        found="not loaded by torch: primus-cli alone runs Primus without it",
        setting=EXPLICIT_LAUNCH,
    )


def use_primus(primus_path: str) -> list[Finding]:
    """Put Primus and the Megatron-LM it would use in front of ``sys.path``, as its launcher does."""
    checkout = Path(primus_path).resolve()
    if not (checkout / "primus" / "cli" / "main.py").is_file():
        return [
            Finding(
                check="PRIMUS_PATH",
                severity="problem",
                found=f"PRIMUS_PATH={primus_path} is no checkout of Primus",
                setting="let it name a checkout of AMD-AGI/Primus, or unset it for the standalone trainer",
            )
        ]
    home = os.environ.get("PRIMUS_THIRDPARTY_DIR") or Path.home() / ".cache" / "Primus" / "third_party"
    named = os.environ.get("BACKEND_PATH")
    # What Primus' runtime looks at, in its order. An empty folder is a submodule that was not checked out.
    candidates = [*([Path(named)] if named else []), checkout / "third_party" / "Megatron-LM", Path(home) / "Megatron-LM"]
    megatron = next((path for path in candidates if (path / "megatron").is_dir()), None)
    sys.path.insert(0, str(checkout))
    if megatron is None:
        return [
            Finding(
                check="Megatron-LM",
                severity="problem",
                found=f"not found in {', '.join(map(str, candidates))}",
                setting="git -C PRIMUS_PATH submodule update --init third_party/Megatron-LM, or export BACKEND_PATH",
            )
        ]
    sys.path.insert(0, str(megatron))
    return [Finding(check="Megatron-LM", severity="ok", found=str(megatron))]
