"""Processor, memory limits and folders, with stand-ins for what the kernel says."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_odc.doctor import system
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.fixture(params=[[], ["/dev/nvidia0"]], ids=["no GPU", "GPU"])
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    files: list[str] = request.param
    monkeypatch.setattr(system, "gpu_files", lambda: files)
    return files


@pytest.mark.parametrize(("config", "severity"), [(None, "problem"), ("exp.yaml", "note")])
def test_other_processors(monkeypatch: pytest.MonkeyPatch, config: str | None, severity: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    finding = only(system.check_processor(Job(config=config)))
    assert finding.severity == severity and "aarch64" in finding.found and "nccl_pad" in finding.setting


def test_memfd_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = only(system.check_processor(Job()))
    assert finding.severity == "problem" and "seccomp" in finding.setting


@pytest.mark.parametrize(
    ("limit", "nodes", "severity", "text"),
    [
        (65536, 1, "note", "64 KiB may be locked, and control words are pinned"),
        (2**23, 1, "ok", "enough"),
        (2**23, 2, "note", "RDMA between nodes"),
        (resource.RLIM_INFINITY, 2, "ok", "unlimited"),
    ],
)
def test_locked_memory(monkeypatch: pytest.MonkeyPatch, gpus: list[str], limit: int, nodes: int, severity: str, text: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = only(system.check_locked_memory(Job(nodes=nodes)))
    assert finding.severity == (severity if gpus else "ok")
    if gpus:
        assert text in finding.found and ("memlock=-1" in finding.setting) == (severity == "note")


def test_small_shm(monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> None:
    state: Any = SimpleNamespace(f_bavail=2**14, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: state)
    finding = only(system.check_shm())
    assert "0.06 GiB" in finding.found
    assert (finding.severity, "--shm-size" in finding.setting) == (("note", True) if gpus else ("ok", False))


def test_no_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SHM", "/nonexistent")
    assert only(system.check_shm()).severity == "note"


@pytest.mark.parametrize(("length", "severity"), [(20, "ok"), (88, "ok"), (91, "note")])
def test_temporary_folder_that_is_too_long_for_sockets(monkeypatch: pytest.MonkeyPatch, length: int, severity: str) -> None:
    # "/symm_mem-4194304" has 17 bytes, and the name of a socket at most 107
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert only(system.check_temporary_folder({"TMPDIR": "/" + "t" * (length - 1)})).severity == severity


def test_temporary_folder_that_is_not_there(tmp_path: Path) -> None:
    finding = only(system.check_temporary_folder({"TMP": str(tmp_path / "none")}))
    assert finding.severity == "note" and finding.setting == "export TMPDIR=/tmp"


@pytest.mark.parametrize("text", ["2\n", None])
def test_ptrace_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "scope").write_text(text)
    monkeypatch.setattr(system, "PTRACE_SCOPE", tmp_path / "scope")
    finding = only(system.check_ptrace())
    assert finding.severity == "ok" and (text.strip() if text else "not restricted") in finding.found


def test_memory_is_that_of_the_kernel() -> None:
    free = only(system.check_memory()).details["available_bytes"]
    with open("/proc/meminfo") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    assert 0 < free <= total
