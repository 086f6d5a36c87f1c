"""AMD's device code: compiled on the node that runs it, from the sources this package installs.

MORI's device functions are headers that are compiled for one GPU architecture *and* one kind of network card, against the very version
whose host library is loaded; another card would get wrong doorbells. All three are known on the node only, so the wheel carries the sources
and the first rank that comes compiles them (hipcc, a few seconds). The result is kept in the user's cache by a digest of everything that
went into it.

``python -m primus_odc.symmetric.shmem.code_object --arch gfx942 --nic mlx5`` does the same ahead of time, for an image.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primus_odc._locks import wait_for_lock
from primus_odc.errors import ConfigError, OdcError
from primus_odc.symmetric.shmem.extension import installed_mori

NICS = ("mlx5", "bnxt", "ionic")
ARCHITECTURES = ("gfx942", "gfx950")
_VENDORS = {"0x15b3": "mlx5", "0x14e4": "bnxt", "0x1dd8": "ionic"}
"""PCI vendors of the cards MORI drives from a GPU: Mellanox and NVIDIA, Broadcom, Pensando."""

_SOURCES = ("kernels.cu", "copy.h", "portable.h", "arguments.h")
_INFINIBAND = Path("/sys/class/infiniband")
_COMPILE_TIMEOUT_S = 300
_LOCK_TIMEOUT_S = 2.0 * _COMPILE_TIMEOUT_S


@dataclass(frozen=True)
class Target:
    """What a code object is built for."""

    arch: str
    """``gfx942`` (MI300) or ``gfx950`` (MI350)."""

    nic: str
    """``mlx5``, ``bnxt`` or ``ionic``."""

    ionic_ccqe: bool = False
    """Ionic cards only: the host library makes collapsed completion queues (MORI decides by firmware and driver)."""

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ConfigError([f"GPU architecture {self.arch!r}: the kernels are written for {' and '.join(ARCHITECTURES)}"])
        if self.nic not in NICS:
            raise ConfigError([f"odc.nic: {self.nic!r} is not one of {', '.join(NICS)}"])

    @property
    def defines(self) -> list[str]:
        """Compiler options that select the card."""
        return [f"-DMORI_DEVICE_NIC_{self.nic.upper()}"] + (["-DIONIC_CCQE"] if self.ionic_ccqe else [])


def detect_nic(devices: Path = _INFINIBAND) -> str:
    """The kind of network card of this node.

    Raises:
        ConfigError: there is none, or there are several kinds: which one the job uses has to be said.
    """
    kinds: dict[str, list[str]] = {}
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        vendor = device / "device" / "vendor"
        if vendor.is_file() and (nic := _VENDORS.get(vendor.read_text().strip())):
            kinds.setdefault(nic, []).append(device.name)
    if len(kinds) == 1:
        return next(iter(kinds))
    if not kinds:
        raise ConfigError([f"no RDMA device of a known vendor in {devices}: set odc.nic to {', '.join(NICS)}"])
    found = "; ".join(f"{nic}: {', '.join(names)}" for nic, names in kinds.items())
    raise ConfigError([f"several kinds of RDMA devices ({found}): set odc.nic to that of the job, and MORI_RDMA_DEVICES to those devices"])


def detect_ccqe(nic: str) -> bool:
    """Whether MORI's host library makes collapsed completion queues; asked of MORI, because kernel and host must agree or hang."""
    if nic != "ionic":
        return False
    from mori.jit.core import is_ccqe_enabled

    return bool(is_ccqe_enabled())


def sources_folder() -> Path:
    """``csrc`` as installed beside this file, or of the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parents[2] / "csrc"):
        if (folder / _SOURCES[0]).is_file():
            return folder
    raise OdcError(f"the kernel sources are not installed in {here / 'csrc'}: install with PRIMUS_ODC_BUILD=mori")


def find_hipcc() -> str:
    """Path of the HIP compiler.

    Raises:
        OdcError: there is none.
    """
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    found = shutil.which("hipcc", path=f"{rocm}/bin") or shutil.which("hipcc")
    if found is None:
        raise OdcError(f"no hipcc in {rocm}/bin or on PATH: MORI and primus_odc compile device code on the node; set ROCM_PATH")
    return found


def cache_folder() -> Path:
    """Where code objects are kept: ``$XDG_CACHE_HOME/primus_odc`` or ``~/.cache/primus_odc``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "primus_odc"


def code_object(target: Target, *, hipcc: str | None = None, mori: Path | None = None, cache: Path | None = None) -> Path:
    """The kernels compiled for ``target``, from the cache or built now; ranks of one node wait for the one that builds.

    Args:
        target: GPU and network card.
        hipcc: the compiler; None: that of ``ROCM_PATH`` or ``PATH``.
        mori: folder of the Python package ``mori``; None: the installed one.
        cache: folder for results; None: :func:`cache_folder`.

    Raises:
        OdcError: compiler, MORI or sources are missing, the compilation fails (with the compiler's words), or another process does not
            end its own.
    """
    compiler = hipcc or find_hipcc()
    folder = mori or installed_mori().folder
    sources = sources_folder()
    include = folder / "_jit-sources" / "include"
    if not (include / "mori" / "shmem" / "shmem.hpp").is_file():
        raise OdcError(f"MORI's headers are not in {include}: install amd-mori >= 1.2.4")
    options = ["-std=c++17", "-O3", "-w", f"--offload-arch={target.arch}", *target.defines]
    digest = hashlib.sha256("\0".join([compiler, *options, (folder / "_version.py").read_text()]).encode())
    digest.update(_run([compiler, "--version"]).encode())
    for name in _SOURCES:
        digest.update((sources / name).read_bytes())
    kept = (cache or cache_folder()) / f"kernels-{target.arch}-{target.nic}-{digest.hexdigest()[:16]}.co"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        late = f"another process has held {lock.name} for {_LOCK_TIMEOUT_S:g} s, longer than a compilation may take: end that process"
        wait_for_lock(lock, _LOCK_TIMEOUT_S, late=late, remedy="set XDG_CACHE_HOME to a folder on a local disk")
        if not kept.is_file():
            with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                built = Path(scratch) / "kernels.co"
                device_only = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output"]
                _run([compiler, *device_only, *options, f"-I{include}", "-c", str(sources / _SOURCES[0]), "-o", str(built)])
                built.replace(kept)
    return kept


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OdcError(f"{command[0]} did not end in {_COMPILE_TIMEOUT_S} s: {' '.join(command)}") from error
    if done.returncode:
        raise OdcError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the kernels for AMD GPUs into the cache and prints the file.")
    parser.add_argument("--arch", required=True, choices=ARCHITECTURES)
    parser.add_argument("--nic", choices=NICS, help="default: that of this node")
    parser.add_argument("--ionic-ccqe", choices=("auto", "on", "off"), default="auto", help="collapsed completion queues; auto asks MORI")
    parser.add_argument("--hipcc", help="default: of ROCM_PATH or PATH")
    parser.add_argument("--mori", type=Path, help="folder of the Python package mori; default: the installed one")
    parser.add_argument("--cache", type=Path, help="default: ~/.cache/primus_odc")
    options = parser.parse_args()
    nic = options.nic or detect_nic()
    ccqe = detect_ccqe(nic) if options.ionic_ccqe == "auto" else options.ionic_ccqe == "on"
    print(code_object(Target(options.arch, nic, ccqe), hipcc=options.hipcc, mori=options.mori, cache=options.cache))


if __name__ == "__main__":
    main()
