"""Which native modules are loaded, and what a refusal says."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from primus_odc.errors import OdcError, VersionError
from primus_odc.symmetric.shmem import extension
from primus_odc.symmetric.shmem.extension import Library, check_mori, check_nvshmem, installed_mori, load_extension, mori_version, release


def mori_in(folder: Path, line: str) -> Path:
    package = folder / "mori"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (package / "_version.py").write_text(line + "\n")
    return package


@pytest.mark.parametrize("library", ["nvshmem", "mori"])
def test_an_installation_without_kernels_says_how_to_make_them(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OdcError, match=f"PRIMUS_ODC_BUILD={library} pip install"):
        load_extension(library)


@pytest.mark.parametrize(
    "line, version",
    [
        ("__version__ = '1.2.4'", "1.2.4"),
        ("__version__ = version = '1.3.0.dev7+g0abc'", "1.3.0.dev7+g0abc"),
        ('__version__: str = "2.0.0"', "2.0.0"),
    ],
)
def test_the_version_of_mori_is_read_without_importing_it(line: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = mori_in(tmp_path, line)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert installed_mori() == extension.InstalledMori(package, version)


@pytest.mark.parametrize("line", ["__version__ = '1.2.3'", "__version__ = '1.2.2.post62'", "__version__ = '0.9.10'"])
def test_an_old_mori_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(VersionError, match=r"older than 1\.2\.4"):
        mori_version(mori_in(tmp_path, line))


def test_a_mori_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="names no version"):
        mori_version(mori_in(tmp_path, "# nothing"))
    with pytest.raises(VersionError, match="names no version"):
        mori_version(tmp_path)


def test_the_module_and_mori_have_the_very_same_version() -> None:
    check_mori("1.2.4", "1.2.4")
    for installed in ("1.2.5", "1.2.4.dev1", "1.3.0"):
        with pytest.raises(VersionError, match=rf"built against MORI 1\.2\.4, and {installed} is installed"):
            check_mori("1.2.4", installed)


def test_the_host_library_of_nvshmem_is_not_older_than_its_headers() -> None:
    check_nvshmem("3.4.5", "3.4.5")
    check_nvshmem("3.4.5", "3.8.0")
    for built, loaded in (("3.8.0", "3.4.5"), ("3.4.5", "4.0.0")):
        with pytest.raises(VersionError, match=f"built against NVSHMEM {built}, and {loaded} is loaded"):
            check_nvshmem(built, loaded)
    with pytest.raises(VersionError, match=r"3\.4\.5 is the oldest tested"):
        check_nvshmem("3.3.0", "3.3.0")


def test_releases() -> None:
    assert release("1.2.4") == release("1.2.4.dev3+g12") == (1, 2, 4) < release("1.10.0")
    assert release("nightly") == ()
