"""scripts/checks.py finds what it is for."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import checks


def arm(name: str, counts: list[list[int]]) -> dict[str, Any]:
    return {
        "arm": name,
        "loss": [5.0, 4.0],
        "grad_norm": [1.0, 1.0],
        "ms_per_step": [10.0, 10.0],
        "tokens_per_s": 100.0,
        "idle_fraction": [0.0, 0.5],
        "microbatches": counts,
    }


GOOD: dict[str, Any] = {
    "arms": [arm("nccl_pad", [[2, 2], [3, 3]]), arm("odc_pad", [[2, 2], [3, 3]]), arm("odc_nopad", [[1, 2], [3, 0]])],
    "speedup": {"odc_pad": 1.1, "odc_nopad": 1.3},
    "ideal_ms": 7.0,
}


def test_a_good_result_passes() -> None:
    assert checks.check_result(GOOD, steps=2, ranks=2) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("loss", [5.0, float("nan")], "odc_pad.loss: expected 2 finite numbers"),
        ("loss", [5.0], "odc_pad.loss: expected 2 finite numbers"),
        ("loss", [5.0, 4.0001], "odc_pad.loss[1]: 4.0001, but nccl_pad has 4.0"),
        ("grad_norm", [float("inf"), 1.0], "odc_pad.grad_norm"),
        ("microbatches", [[2, 2], [3, 2]], "equal counts on all ranks"),
        ("microbatches", [[2, 2], [2, 2]], "the very same plan"),
        ("microbatches", [[2, 2]], "expected 2 steps of 2 counts"),
        ("idle_fraction", [0.1, 1.1], "numbers from 0 to 1"),
        ("tokens_per_s", 0.0, "odc_pad.tokens_per_s"),
        ("arm", "other", "no arm odc_pad"),
    ],
)
def test_a_defect_of_one_arm_is_named(key: str, value: object, problem: str) -> None:
    result = copy.deepcopy(GOOD)
    result["arms"][1][key] = value
    assert any(problem in found for found in checks.check_result(result, steps=2, ranks=2))


def test_a_tensor_without_a_device_is_named() -> None:
    source = (
        "import torch\n\nx = torch.zeros(2, device=d)\ny = [torch.tensor([1], dtype=torch.int64) for _ in range(2)]\nz = x.new_zeros(1)\n"
    )
    assert checks.check_devices(Path("primus_odc/a.py"), source) == ["primus_odc/a.py:4: torch.tensor() without device="]


def test_missing_speedup_and_ideal_are_named() -> None:
    found = checks.check_result({**GOOD, "speedup": {"odc_pad": 1.1}, "ideal_ms": 0.0}, steps=2, ranks=2)
    assert [problem.split(":")[0] for problem in found] == ["speedup.odc_nopad", "ideal_ms"]


def test_long_files_and_machine_paths_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    (tmp_path / "long.py").write_text("x = 1\n" * 401)
    (tmp_path / "limit.py").write_text("x = 1\n" * 400)
    (tmp_path / "table.csv").write_text("1\n" * 401)
    (tmp_path / "notes.md").write_text("fine: frame/work/loop, ~/home\nkept in " + "/" + "home/somebody/models\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    found = checks.check_source(sorted(path.relative_to(tmp_path) for path in tmp_path.iterdir()))
    assert [problem.split(" ")[0] for problem in found] == ["long.py:", "notes.md:2:"]


def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    wheel = tmp_path / "primus_odc-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("primus_odc/__init__.py", "")
        archive.writestr("primus_odc-0.1.0.dist-info/entry_points.txt", "[console_scripts]\nprimus-odc = primus_odc.cli:main\n")
    files = [Path("primus_odc/__init__.py"), Path("tests/test_a.py")]
    assert checks.check_wheel(wheel, files) == []
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_a.py", "")
    found = checks.check_wheel(wheel, [*files, Path("primus_odc/config.py")])
    assert [problem.split(": ")[1] for problem in found] == ["lacks primus_odc/config.py", "stray tests/test_a.py"]
