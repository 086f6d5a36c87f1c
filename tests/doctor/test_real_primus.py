"""A YAML judged as the real Primus would train it: presets resolved by its own loader, checks on its own Megatron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus_odc.primus import presets

PRESETS = Path(presets.__file__).parent
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        not os.environ.get("PRIMUS_PATH") or not os.environ.get("MEGATRON_PATH"),
        reason="needs PRIMUS_PATH and MEGATRON_PATH, checkouts of Primus and of the Megatron-LM it pins: bash scripts/primus_tests.sh",
    ),
]


def doctor(tmp_path: Path, *words: str) -> dict[str, list[str]]:
    """Severity -> what was found, of the checks that the YAML is part of."""
    environment = {
        **os.environ,
        "BACKEND_PATH": os.environ["MEGATRON_PATH"],
        "PRIMUS_ODC_PRESETS": str(PRESETS),
        "PRIMUS_WORKSPACE": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "primus_odc", "doctor", *words, "--ranks", "2", "--json", "--time-limit", "150"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    told: dict[str, list[str]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        told.setdefault(f"{finding['check']} {finding['severity']}", []).append(finding["found"])
    assert result.returncode == 1  # there is no GPU
    return told


@pytest.mark.parametrize("preset", ["tiny_sft", "tiny_pretrain"])
def test_a_preset_lacks_nothing_but_gpus(tmp_path: Path, preset: str) -> None:
    told = doctor(tmp_path, str(PRESETS / f"{preset}.yaml"))
    assert told["Primus ok"][0].startswith("26.5") and told["megatron-core ok"][0].startswith("0.16")
    assert told["Megatron-LM ok"] == [os.environ["MEGATRON_PATH"]]
    problem, *others = told["configuration problem"]
    assert "Primus needs a GPU for each of 2 processes" in problem
    compiled = list((Path(os.environ["MEGATRON_PATH"]) / "megatron/core/datasets").glob("helpers_cpp*.so"))
    if preset == "tiny_sft" or compiled:
        assert others == []
    else:
        assert len(others) == 1 and f"run make -C {os.environ['MEGATRON_PATH']}/megatron/core/datasets" in others[0]


def test_what_primus_cannot_do_is_told_together(tmp_path: Path) -> None:
    told = doctor(tmp_path, str(PRESETS / "tiny_sft.yaml"), "--pipeline_model_parallel_size", "2", "--use_torch_fsdp2", "false")
    problems = "\n".join(told["configuration problem"])
    for key in ("pipeline_model_parallel_size", "use_torch_fsdp2", "needs a GPU for each of 2"):
        assert key in problems, problems
