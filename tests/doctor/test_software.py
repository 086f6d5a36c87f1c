"""What is installed and set."""

from __future__ import annotations

import importlib.metadata

import pytest

from primus_odc.doctor import software
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job

PRIMUS = Job(primus_path="/checkout")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("version", "severity"), [((3, 9), "problem"), ((3, 10), "note"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 14), "note")]
)
def test_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], severity: str) -> None:
    monkeypatch.setattr(software, "python_version", lambda: version)
    finding = only(software.check_python())
    assert finding.severity == severity and bool(finding.setting) == (severity != "ok")


def test_primus_odc_installed_in_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(software.check_primus_odc()).severity == "ok"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0.9")
    finding = only(software.check_primus_odc())
    assert finding.severity == "problem" and "0.0.9" in finding.found


def test_primus_odc_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    finding = only(software.check_primus_odc())
    assert finding.severity == "note" and "pip install" in finding.setting


def test_the_entry_point_of_this_environment_is_found() -> None:
    finding = only(software.check_entry_point(PRIMUS, {}))
    assert finding.severity == "ok" and "primus_odc.primus.loading:autoload" in finding.found


@pytest.mark.parametrize(("environment", "points"), [({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ["a:b"]), ({}, [])])
def test_entry_points_that_do_not_work_matter_in_primus(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], points: list[str]
) -> None:
    monkeypatch.setattr(software, "entry_points", lambda: points)
    finding = only(software.check_entry_point(PRIMUS, environment))
    assert finding.severity == "note" and "primus_odc.primus.launch" in finding.setting
    assert only(software.check_entry_point(Job(), environment)).severity == "ok"


def test_patches_that_are_switched_off() -> None:
    environment = {"PRIMUS_PATCHES": "none"}
    finding = only(software.check_patches(PRIMUS, environment))
    assert finding.severity == "problem" and "unset it" in finding.found
    assert only(software.check_patches(Job(), environment)).severity == "note"
    assert only(software.check_patches(PRIMUS, {})).severity == "ok"


def test_libraries_that_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "has_module", lambda name: name in ("primus_turbo", "mori"))
    assert only(software.check_turbo()).found == "installed; none of its ODC operators is needed"
    assert only(software.check_shmem()).found.startswith("MORI is installed; kernels for neither are built")
    monkeypatch.setattr(software, "has_module", lambda name: False)
    assert only(software.check_turbo()).found.startswith("not installed")
    assert only(software.check_shmem()).found.startswith("MORI is not installed; kernels for neither are built")
    monkeypatch.setattr(software, "has_module", lambda name: name.endswith("._nvshmem"))
    assert "kernels for nvshmem are built" in only(software.check_shmem()).found


@pytest.mark.parametrize("variable", software.ALLOCATORS)
def test_expandable_segments(variable: str) -> None:
    finding = only(software.check_allocator({variable: "max_split_size_mb:64,expandable_segments:True"}))
    assert finding.severity == "note" and variable in finding.found and finding.setting
    assert only(software.check_allocator({variable: "expandable_segments:False"})).severity == "ok"
