"""The native module of ``csrc/``: found, or refused with what to do.

It is built by ``PRIMUS_ODC_BUILD=nvshmem|mori pip install .``, one module per library. A module built against another version than the
one installed is refused: MORI copies a structure into our kernels' memory whose size changed between versions, and NVSHMEM's host library
must not be older than the device library that is linked in.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from primus_odc.errors import OdcError, VersionError

Library = Literal["nvshmem", "mori"]
"""The values of ``odc.transport`` this package serves."""

FIRST_MORI = (1, 2, 4)
"""Before 1.2.1 reads over the network returned before their data; before 1.2.4 completions could be lost."""

FIRST_NVSHMEM = (3, 4, 5)
"""What torch 2.11 to 2.13 bring, and what the kernels ran with."""


@dataclass(frozen=True)
class InstalledMori:
    """The Python package ``mori`` as installed, found without importing it."""

    folder: Path
    version: str


def release(version: str) -> tuple[int, ...]:
    """``"1.2.4.dev3+g12"`` -> ``(1, 2, 4)``; an empty tuple where there is no such number."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else ()


def installed_mori() -> InstalledMori:
    """The installed MORI.

    Raises:
        VersionError: it is missing, tells no version, or is older than :data:`FIRST_MORI`.
    """
    spec = importlib.util.find_spec("mori")
    if spec is None or not spec.submodule_search_locations:
        raise VersionError(f"MORI is not installed: pip install 'amd-mori>={_dotted(FIRST_MORI)}' (needs ROCm 7 and Python 3.12)")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return InstalledMori(folder, mori_version(folder))


def mori_version(folder: Path) -> str:
    """The version of the MORI in ``folder``; see :func:`installed_mori`."""
    file = folder / "_version.py"
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"__version__[^=\n]*=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", text)
    if found is None:
        raise VersionError(f"{file} names no version of MORI: install amd-mori>={_dotted(FIRST_MORI)}")
    if release(found[1]) < FIRST_MORI:
        raise VersionError(f"MORI {found[1]} in {folder} is older than {_dotted(FIRST_MORI)}, the first that is served; upgrade amd-mori")
    return found[1]


def load_extension(library: Library) -> ModuleType:
    """The native module for ``library``.

    Raises:
        OdcError: it was not built, or cannot be loaded.
        VersionError: it was built against another version of the library than the one installed.
    """
    name = f"primus_odc.symmetric.shmem._{library}"
    if importlib.util.find_spec(name) is None:
        raise OdcError(
            f"odc.transport: {library} needs the kernels, and this installation was made without them: PRIMUS_ODC_BUILD={library} pip "
            "install --no-deps . in the checkout, on a machine with the vendor's compiler"
        )
    mori = installed_mori() if library == "mori" else None
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise OdcError(f"odc.transport: {library}: its module cannot be loaded ({error}); build it again in this environment") from error
    if mori is not None:
        check_mori(module.built_version(), mori.version)
    else:
        check_nvshmem(module.built_version(), module.loaded_version())
    return module


def check_mori(built: str, installed: str) -> None:
    """Refuse any difference: the structure's size follows from the exact version."""
    if built != installed:
        raise VersionError(
            f"the kernels' host half was built against MORI {built}, and {installed} is installed; MORI's device state has another layout "
            "in each: build again with PRIMUS_ODC_BUILD=mori pip install --no-deps ."
        )


def check_nvshmem(built: str, loaded: str) -> None:
    """Refuse a host library that is older than the headers, of another major version, or older than what was tested."""
    if release(loaded) < FIRST_NVSHMEM:
        raise VersionError(f"NVSHMEM {loaded} is loaded; {_dotted(FIRST_NVSHMEM)} is the oldest tested: upgrade nvidia-nvshmem-cu13")
    if release(loaded) < release(built) or release(loaded)[0] != release(built)[0]:
        raise VersionError(
            f"the kernels were built against NVSHMEM {built}, and {loaded} is loaded: build again in this environment "
            "(PRIMUS_ODC_BUILD=nvshmem pip install --no-deps .)"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
