"""Stages in a child process: one that hangs or dies costs its own findings only. A script stands in for the real child."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from primus_odc.doctor import child
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job

# Writes down its process, then does for every stage what BEHAVIOUR says.
SCRIPT = """
import json, os, sys, time
order = json.load(sys.stdin)
with open(os.environ["PROCESSES"], "a") as file:
    print(os.getpid(), *order["stages"], json.dumps(order["job"]["facts"]), file=file)
behaviour = json.loads(os.environ["BEHAVIOUR"])
lines = os.fdopen(int(sys.argv[1]), "w")
print("chatter of a library")
for stage in order["stages"]:
    what = behaviour.get(stage, "answer")
    if what == "hang":
        time.sleep(600)
    if what == "die":
        sys.exit("ImportError: libcuda is broken")
    if what == "kill":
        os.kill(os.getpid(), 9)
    finding = {"check": stage, "severity": "ok", "found": "fine", "setting": "", "details": {"n": 1}}
    print(json.dumps({"stage": stage, "findings": [finding], "facts": {stage: True}}), file=lines, flush=True)
"""
FINE = {name: Finding(check=name, severity="ok", found="fine", details={"n": 1}) for name in ("packages", "gpus", "run", "memory")}


class Stand:
    """Runs stages with the stand-in and tells which processes were started."""

    def __init__(self, folder: Path) -> None:
        self.processes = folder / "processes"

    def run(self, job: Job, behaviour: dict[str, str] | None = None, *, scale: float = 1.0, limit_s: float = 50.0) -> list[Finding]:
        environment = {**os.environ, "BEHAVIOUR": json.dumps(behaviour or {}), "PROCESSES": str(self.processes)}
        return child.run_stages(job, environment, scale, time.monotonic() + limit_s)

    def started(self) -> list[str]:
        """What every process was asked for, its facts at the end."""
        return [line.split(" ", 1)[1] for line in self.processes.read_text().splitlines()]

    def alive(self) -> list[int]:
        pids = [int(line.split()[0]) for line in self.processes.read_text().splitlines()]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    (tmp_path / "child.py").write_text(SCRIPT)
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-S", str(tmp_path / "child.py")))
    return Stand(tmp_path)


def test_all_stages_run_in_one_process(stand: Stand) -> None:
    job = Job(config="exp.yaml")
    assert stand.run(job) == list(FINE.values())
    assert job.facts == dict.fromkeys(FINE, True)
    assert stand.started() == ["packages gpus run memory {}"]
    assert stand.alive() == []


def test_without_a_yaml_the_machine_alone_is_checked(stand: Stand) -> None:
    assert stand.run(Job()) == [FINE["packages"], FINE["gpus"]]


def test_a_stage_that_hangs_is_ended_and_the_others_run(stand: Stand) -> None:
    findings = stand.run(Job(config="exp.yaml"), {"gpus": "hang"}, scale=0.3)
    assert [f for f in findings if f.severity == "ok"] == [FINE["packages"], FINE["run"], FINE["memory"]]
    (late,) = (f for f in findings if f.severity != "ok")
    assert (late.check, late.severity) == ("GPUs", "note")
    assert "no answer within 3.6 s" in late.found and "--time-limit" in late.setting
    assert stand.started() == ["packages gpus run memory {}", 'run memory {"packages": true}']
    assert stand.alive() == []


@pytest.mark.parametrize(("stage", "check", "severity"), [("run", "configuration", "problem"), ("memory", "engine memory", "note")])
def test_a_stage_that_dies_says_its_last_words(stand: Stand, stage: str, check: str, severity: str) -> None:
    findings = stand.run(Job(config="exp.yaml"), {stage: "die"})
    (dead,) = (f for f in findings if f.severity != "ok")
    assert (dead.check, dead.severity) == (check, severity)
    assert "ImportError: libcuda is broken" in dead.found and "ODC_SKIP_DOCTOR=1" in dead.setting
    assert len(findings) == 4


def test_the_real_child_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from primus_odc.doctor import stages
def broken(job): raise OSError("libcuda is broken")
stages.STAGES.update(packages=lambda job: [], gpus=broken)
stages.main()
"""
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c", code))
    (dead,) = child.run_stages(Job(), os.environ, 2.0, time.monotonic() + 50)
    assert (dead.check, dead.found) == ("GPUs", "the check died: OSError: libcuda is broken")


def test_a_stage_that_is_killed(stand: Stand) -> None:
    findings = stand.run(Job(), {"packages": "kill"})
    assert findings[0].severity == "problem" and "without a word" in findings[0].found
    assert findings[1] == FINE["gpus"]


def test_what_the_whole_limit_leaves_no_time_for_is_told(stand: Stand) -> None:
    findings = stand.run(Job(config="exp.yaml"), {"packages": "hang"}, limit_s=1.0)
    assert [(f.check, f.severity) for f in findings] == [(stage.check, "note") for stage in child.STAGES]
    assert all("not checked" in f.found for f in findings)
    assert stand.alive() == []
