"""Versions of what is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron.core
import pytest
import torch

from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.packages import PLUGIN, check_packages


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {f.check: f for f in findings}


def test_those_of_this_environment() -> None:
    found = by_check(check_packages(Job()))
    assert found.pop("plugin").severity == "ok"
    assert {name: (f.severity, f.details["version"]) for name, f in found.items()} == {
        "torch": ("ok", torch.__version__),
        "megatron-core": ("ok", megatron.core.__version__),
    }


def test_a_plugin_that_torch_did_not_load(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    assert by_check(check_packages(Job()))["plugin"].severity == "ok"
    found = by_check(check_packages(Job(primus_path=str(checkout))))["plugin"]
    monkeypatch.delitem(sys.modules, "primus")
    assert found.severity == "note" and "primus_odc.primus.launch" in found.setting


def test_untested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    found = by_check(check_packages(Job()))
    assert found["torch"].severity == found["megatron-core"].severity == "problem"
    assert "2.10.1" in found["torch"].found and "torch>=2.11,<2.14" in found["torch"].found
    assert "0.17.0" in found["megatron-core"].found


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Primus whose package has version 26.4; without Megatron-LM."""
    (tmp_path / "primus/cli").mkdir(parents=True)
    (tmp_path / "primus/cli/main.py").touch()
    (tmp_path / "primus/__init__.py").write_text('__version__ = "26.4"\n')
    (tmp_path / "third_party/Megatron-LM").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PRIMUS_THIRDPARTY_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("BACKEND_PATH", raising=False)
    monkeypatch.delitem(sys.modules, "primus", raising=False)
    return tmp_path


def test_another_primus_without_its_submodule(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_check(check_packages(Job(primus_path=str(checkout))))
    monkeypatch.delitem(sys.modules, "primus")
    assert found["Primus"].severity == "problem" and "26.4" in found["Primus"].found
    assert found["Megatron-LM"].severity == "problem" and "submodule update" in found["Megatron-LM"].setting


def test_megatron_is_the_one_primus_would_take(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "third_party/Megatron-LM/megatron").mkdir()
    assert by_check(check_packages(Job(primus_path=str(checkout))))["Megatron-LM"].found == str(checkout / "third_party/Megatron-LM")
    assert sys.path[:2] == [str(checkout / "third_party/Megatron-LM"), str(checkout)]
    (checkout / "own/megatron").mkdir(parents=True)
    monkeypatch.setenv("BACKEND_PATH", str(checkout / "own"))
    assert by_check(check_packages(Job(primus_path=str(checkout))))["Megatron-LM"].found == str(checkout / "own")
    monkeypatch.delitem(sys.modules, "primus")


def test_no_primus_at_its_path(tmp_path: Path) -> None:
    found = by_check(check_packages(Job(primus_path=str(tmp_path))))
    assert found["PRIMUS_PATH"].severity == "problem" and "unset it" in found["PRIMUS_PATH"].setting
