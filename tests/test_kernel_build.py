"""What CMakeLists.txt refuses, before any compiler runs for long."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def configure(folder: Path, **options: str) -> str:
    """What CMake says when it refuses; the test fails where it does not."""
    cmake = shutil.which("cmake")
    pytest.importorskip("pybind11", reason="needs pybind11 (the build brings its own)")
    if cmake is None:
        pytest.skip("needs cmake (the build brings its own)")
    values = [f"-D{name}={value}" for name, value in options.items()]
    command = [cmake, "-S", str(ROOT), "-B", str(folder / "build"), f"-DPython_EXECUTABLE={sys.executable}", *values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


def mori_in(folder: Path, version: str) -> str:
    include = folder / "_jit-sources" / "include" / "mori" / "shmem"
    include.mkdir(parents=True)
    (include / "shmem.hpp").touch()
    (folder / "libmori_shmem.so").touch()
    (folder / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return str(folder)


def test_an_unknown_library_is_refused(tmp_path: Path) -> None:
    assert "PRIMUS_ODC_BUILD is 'rocshmem': set it to nvshmem (NVIDIA) or mori (AMD)" in configure(tmp_path, PRIMUS_ODC_BUILD="rocshmem")


def test_an_old_mori_is_refused(tmp_path: Path) -> None:
    told = configure(tmp_path, PRIMUS_ODC_BUILD="mori", MORI_HOME=mori_in(tmp_path / "mori", "1.2.3"))
    assert "MORI 1.2.3" in told and "is too old: 1.2.4 is the first" in told


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert "set NVSHMEM_HOME" in configure(tmp_path, PRIMUS_ODC_BUILD="nvshmem", NVSHMEM_HOME=nowhere)
    told = configure(tmp_path / "2", PRIMUS_ODC_BUILD="mori", MORI_HOME=mori_in(tmp_path / "mori", "1.2.4"), ROCM_PATH=nowhere)
    assert "set ROCM_PATH" in told
