"""What a result says about the sources that made it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import primus_odc
from primus_odc.bench.results import identity
from primus_odc.report.machine import describe_versions

PACKAGE = Path(primus_odc.__file__).parent
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.invalid")


def copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's top level, which then stands for the package."""
    (folder / "primus_odc").mkdir(parents=True)
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, folder / "primus_odc")
    monkeypatch.setattr(primus_odc, "__file__", str(folder / "primus_odc" / "__init__.py"))
    return folder / "primus_odc"


def test_without_git_the_commit_is_unknown_and_the_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = copied(tmp_path / "a", monkeypatch)
    told = describe_versions()
    assert told["commit"] == "unknown" and len(told["sources"]) == 12
    second = copied(tmp_path / "b", monkeypatch)
    assert describe_versions()["sources"] == told["sources"]
    (second / "errors.py").write_text((second / "errors.py").read_text() + "\n")
    edited = describe_versions()["sources"]
    (second / "errors.py").rename(second / "mistakes.py")
    assert len({told["sources"], edited, describe_versions()["sources"]}) == 3
    monkeypatch.setattr(primus_odc, "__file__", str(first / "__init__.py"))
    (first / "notes.txt").write_text("no source")
    assert describe_versions()["sources"] == told["sources"]


def test_a_commit_older_than_the_files_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = copied(tmp_path, monkeypatch)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*GIT, "-C", str(tmp_path), *words], check=True, timeout=30)
    clean = identity(None)
    assert len(clean["commit"]) == 12 and "commit" not in clean["versions"]
    (package / "errors.py").write_text("")
    changed = identity(None)
    assert changed["commit"] == clean["commit"] + "+"
    assert changed["versions"]["sources"] != clean["versions"]["sources"]
    assert identity("given")["commit"] == "given"
    # As a copy would have it that leaves the index's times and sizes alone: git sees nothing, the digest does.
    subprocess.run([*GIT, "-C", str(tmp_path), "update-index", "--assume-unchanged", "primus_odc/errors.py"], check=True, timeout=30)
    assert identity(None)["commit"] == clean["commit"]
    assert identity(None)["versions"]["sources"] == changed["versions"]["sources"]
