from __future__ import annotations

import importlib.util

import pytest

from primus_odc.data.progress import with_progress


def test_a_line_per_ten_percent_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(with_progress(range(25), 25, "counting")) == list(range(25))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[0].startswith("counting: 10 % (3 of 25") and lines[-1].startswith("counting: 100 % (25 of 25")
    assert list(with_progress(range(3), 3, "counting")) == [0, 1, 2]
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == ["counting: 30 %", "counting: 60 %", "counting: 100 %"]


def test_a_bar_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    assert list(with_progress(range(3), 3, "counting")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert "counting: 100%" in captured.err and "3/3" in captured.err and not captured.out
