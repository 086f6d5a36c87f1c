"""`primus-odc doctor` itself: real runs here, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from primus_odc.cli import main
from primus_odc.doctor import command, network
from primus_odc.doctor.finding import SEVERITIES, Finding

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "cpu_odc_nopad.yaml")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without what would make this machine look like part of a job."""
    unset = (
        "PRIMUS_PATH",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NNODES",
        "NODE_RANK",
        "WORLD_SIZE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "PRIMUS_PATCHES",
    )
    return {key: value for key, value in os.environ.items() if key not in unset} | {"PRIMUS_WORKSPACE": str(tmp_path)}


def doctor(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "primus_odc", "doctor", "--time-limit", "150", *words)
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=170)


def parsed(output: str) -> dict[str, dict[str, Any]]:
    """Check -> finding, after validating the whole object."""
    content = json.loads(output)
    assert set(content) == {"format", "ok", "seconds", "findings"} and content["format"] == 1
    names = {field.name for field in fields(Finding)}
    for finding in content["findings"]:
        assert set(finding) == names and finding["severity"] in SEVERITIES
        assert finding["check"] and finding["found"] and isinstance(finding["setting"], str) and isinstance(finding["details"], dict)
    assert content["ok"] is all(finding["severity"] != "problem" for finding in content["findings"])
    return {finding["check"]: finding for finding in content["findings"]}


@pytest.mark.timeout(180)
def test_a_yaml_on_this_machine(environment: dict[str, str]) -> None:
    result = doctor(environment, CONFIG, "--ranks", "2", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = parsed(result.stdout)
    assert set(found) >= {"Python", "torch", "megatron-core", "primus_odc", "processor", "memory", "host name", "GPUs", "RDMA", "ptrace"}
    assert found["arm"]["details"] == {"arm": "odc_nopad", "ranks": 2}
    assert found["transport"]["details"] == {"transport": "host"}
    assert found["engine memory"]["details"]["bytes"]["gradients"] > 4 * found["engine memory"]["details"]["parameters"] * 0.99
    assert found["configuration"]["severity"] == "ok"


@pytest.mark.timeout(180)
def test_problems_end_with_status_1_and_are_all_that_is_printed(environment: dict[str, str]) -> None:
    environment |= {"GLOO_SOCKET_IFNAME": "none0"}
    result = doctor(environment, CONFIG, "--ranks", "2", "--quiet", "--comm_backend", "odc_nopd", "--odc.timeout", "3")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert not any(line.startswith("ok ") for line in lines)
    for text in ("GLOO_SOCKET_IFNAME=none0", "did you mean 'odc_nopad'", "did you mean 'timeout_s'"):
        assert text in " ".join(" ".join(lines).split())


@pytest.mark.timeout(180)
def test_a_locale_of_ascii_names_what_is_wrong_all_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "e.yaml").write_text(f"extends: [{CONFIG}]\nenv:\n  LABEL: café\n", encoding="utf-8")
    names = {"MASTER_ADDR": "bücher", "GLOO_SOCKET_IFNAME": "nö0", "NNODES": "zwölf"}
    result = doctor(environment | ascii_only | names, str(tmp_path / "e.yaml"), "--ranks", "2", "--quiet")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("problem ")}
    assert set(lines) >= {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NNODES", "configuration"}, result.stdout
    assert "e.yaml: env.LABEL: this locale's encoding (ascii) has no '\\xe9'" in " ".join(result.stdout.split())


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What stands in for the stages of the child process."""
    findings: list[Finding] = []
    monkeypatch.setattr(command, "run_stages", lambda *_: findings)
    for name in ("PRIMUS_PATH", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return findings


def test_exit_code_follows_from_problems_alone(no_child: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    no_child.append(Finding(check="x", severity="note", found="slow"))
    assert main(["doctor"]) == 0
    no_child.append(Finding(check="y", severity="problem", found="broken"))
    capsys.readouterr()
    assert main(["doctor", "--quiet", "--json"]) == 1
    found = parsed(capsys.readouterr().out)
    assert {"x", "y"} <= set(found) and "memory" not in found


def test_quiet_and_nothing_to_tell(no_child: list[Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "examine", lambda *_: [Finding(check="x", severity="ok", found="fine")])
    assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_the_env_block_of_the_yaml_counts(no_child: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.yaml").write_text("env:\n  GLOO_SOCKET_IFNAME: none0\n")
    assert main(["doctor", str(tmp_path / "e.yaml")]) == 1
    assert "GLOO_SOCKET_IFNAME=none0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr=1"], "overridden after a YAML"),
        (["--ranks", "0"], "'0' is not a whole number from 1 to 100000000"),
        (["--nodes", "two"], "whole number from 1 to 100000000"),
        (["--nodes", "1000000000"], "'1000000000' is not a whole number from 1 to 100000000"),
        (["--time-limit", "0"], "from above 0"),
    ],
)
def test_words_it_does_not_understand(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["doctor", *words])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    answer = threading.Event()

    def resolve(name: str) -> list[str]:
        answer.wait(50)
        return []

    monkeypatch.setattr(network, "resolve", resolve)
    yield answer
    answer.set()


def test_a_resolver_that_hangs_does_not_hold_the_command(
    no_child: list[Finding], hanging: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--nodes", "2", "--time-limit", "1", "--json"]) == 1
    assert not hanging.is_set()
    found = parsed(capsys.readouterr().out)
    assert found["host name"]["severity"] == "problem" and "no answer" in found["host name"]["found"]
