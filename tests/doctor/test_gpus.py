"""The stage that asks GPUs, with stand-ins for torch's answers: this is what runs where there is no GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from primus_odc.doctor import gpus
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.errors import OdcError

GIB = 2**30


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Four GPUs with 100, 90, 80, 70 GiB free; the pairs in the result do not reach each other."""
    apart: set[tuple[int, int]] = set()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200" if device else "MI300X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((100 - 10 * device) * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) not in apart)
    monkeypatch.setattr(gpus, "_written_word", lambda torch: gpus._WORD)
    return apart


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {f.check: f for f in findings}


def test_without_torch_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpus.check_gpus(Job()) == []


def test_gpus_that_work(four: set[tuple[int, int]]) -> None:
    job = Job()
    found = by_check(gpus.check_gpus(job))
    assert {f.severity for f in found.values()} == {"ok"}
    assert found["GPUs"].found == "1 x MI300X, 3 x H200; at least 70.0 GiB free"
    assert job.facts == {"gpus": 4, "gpu_free_bytes": 70 * GIB, "no_p2p": []}
    assert (job.world({}), Job(nodes=2, facts=job.facts).world({})) == (4, 8)


@pytest.mark.parametrize(("config", "severity"), [(None, "problem"), ("exp.yaml", "note")])
def test_gpus_that_do_not_reach_each_other(four: set[tuple[int, int]], config: str | None, severity: str) -> None:
    four |= {(0, 3), (3, 0)}
    job = Job(config=config)
    found = by_check(gpus.check_gpus(job))["P2P"]
    assert found.severity == severity and "0-3, 3-0" in found.found and "CUDA_VISIBLE_DEVICES" in found.setting
    assert job.facts["no_p2p"] == ["0-3", "3-0"]


def fails(error: Exception) -> Any:
    def written(torch: Any) -> int:
        raise error

    return written


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (fails(OdcError("cannot be pinned: ulimit -l")), "ulimit -l"),
        (fails(OSError("libcuda.so.1: cannot open")), "libcuda.so.1"),
        (lambda torch: 0, "the host reads 0x0"),
    ],
)
def test_words_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, four: set[tuple[int, int]], written: Any, text: str) -> None:
    monkeypatch.setattr(gpus, "_written_word", written)
    job = Job()
    found = by_check(gpus.check_gpus(job))["control words"]
    assert found.severity == "problem" and text in found.found
    assert text in job.facts["stream_words"]


@pytest.mark.parametrize(("files", "severity"), [([], "ok"), (["/dev/kfd"], "note")])
def test_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch, files: list[str], severity: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(gpus, "gpu_files", lambda: files)
    job = Job()
    (finding,) = gpus.check_gpus(job)
    assert finding.severity == severity
    assert ("HIP_VISIBLE_DEVICES" in finding.setting) == bool(files)
    assert job.facts == {"gpus": 0}
