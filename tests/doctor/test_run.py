"""A YAML on this machine: keys, arm and transport."""

from __future__ import annotations

import importlib.util
import os
import platform
import sysconfig
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from primus_odc.config import parse_odc
from primus_odc.doctor import run
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.experiment import Experiment, load_experiment
from primus_odc.symmetric.shmem.code_object import detect_nic

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU, NCCL_PAD = (str(ROOT / "configs" / f"{name}.yaml") for name in ("cpu_odc_nopad", "gpu_odc_nopad", "cpu_nccl_pad"))


@pytest.fixture(autouse=True)
def outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment is as before afterwards, and no earlier run is in the way."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("PRIMUS_WORKSPACE", str(tmp_path))
    monkeypatch.delenv("TORCH_SYMMMEM", raising=False)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {f.check: f for f in findings}


def problems(findings: list[Finding]) -> list[str]:
    return [f.found for f in findings if f.severity == "problem"]


def test_a_yaml_that_can_be_trained() -> None:
    findings = run.check_run(Job(config=CPU, ranks=3))
    assert {f.severity for f in findings} == {"ok"}
    found = by_check(findings)
    assert found["arm"].details == {"arm": "odc_nopad", "ranks": 3}
    assert found["transport"].details == {"transport": "host"}
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"


def test_every_wrong_key_is_told() -> None:
    """T26: misspelt keys and values, with the nearest name."""
    words = ["--enable_ocd", "true", "--comm_backend", "odc_nopd", "--odc.transport", "rocshm", "--lr", "null"]
    told = "\n".join(problems(run.check_run(Job(config=CPU, overrides=words))))
    for expected in ("enable_odc", "did you mean 'odc_nopad'", "did you mean 'mori'", "lr "):
        assert expected in told, told


def test_pretraining_in_primus_needs_megatrons_compiled_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "megatron/core/datasets"
    folder.mkdir(parents=True)
    megatron = ModuleSpec("megatron.core", None, origin=str(tmp_path / "megatron/core/__init__.py"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: megatron if name == "megatron.core" else find(name))
    in_primus = replace(load_experiment(CPU), module_name="pre_trainer", self_contained=False, params={"lr": 1.0})
    monkeypatch.setattr(run, "load_experiment", lambda *args, **options: in_primus)
    job = Job(config="x.yaml", ranks=1, primus_path="primus")
    (told,) = problems(run.check_run(job))
    assert f"{folder} has no helpers_cpp" in told and f"run make -C {folder}" in told
    (folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert problems(run.check_run(job)) == []


def test_a_transport_that_does_not_reach_the_tensors() -> None:
    (told,) = problems(run.check_run(Job(config=CPU, overrides=["odc.transport=mori"])))
    assert "mori does not reach tensors on cpu; set odc.transport: host (or auto)" in told


def test_gpus_of_several_nodes_need_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "describe_run", describe("odc_pad", "cuda"))
    (told,) = problems(run.check_run(Job(config="exp.yaml", ranks=16, nodes=2, facts={"gpus": 8})))
    assert "PRIMUS_ODC_BUILD=nvshmem pip install" in told and "these ranks are on 2 machines" in told


@pytest.mark.parametrize(("seen", "advice"), [(0, "set distributed_backend: gloo"), (4, "start fewer (GPUS_PER_NODE), or set ")])
def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, seen: int, advice: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    (told,) = problems(run.check_run(Job(config=GPU, ranks=8)))
    assert f"needs a GPU for each of 8 processes of this host and torch sees {seen}; {advice}" in told


def test_samples_for_a_step() -> None:
    (told,) = problems(run.check_run(Job(config=CPU, overrides=["--sft_max_samples", "8", "--eval_iters", "0"], ranks=2)))
    assert "global_batch_size: 9 is more than the" in told


def test_several_nodes() -> None:
    (told,) = problems(run.check_run(Job(config=CPU, ranks=4, nodes=2)))
    assert "reaches the ranks of one node and there are 2" in told and "nccl_pad" in told
    assert problems(run.check_run(Job(config=NCCL_PAD, ranks=4, nodes=2))) == []


def test_a_processor_that_orders_stores_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    (told,) = problems(run.check_run(Job(config=CPU, ranks=2)))
    assert "aarch64" in told
    assert problems(run.check_run(Job(config=NCCL_PAD, ranks=2))) == []


def describe(arm: str, device: Any) -> Any:
    from primus_odc.config import parse_odc

    return lambda job, thorough: run.Run(comm=parse_odc({"comm_backend": arm}), params={}, device_type=device, kind=None)


def test_what_symmetric_memory_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "describe_run", describe("odc_pad", "cuda"))
    job = Job(config="exp.yaml", ranks=4, facts={"gpus": 4})
    assert by_check(run.check_run(job))["transport"].details == {"transport": "symm_mem"}
    job.facts |= {"no_p2p": ["0-3"], "stream_words": "cannot be pinned"}
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    told = problems(run.check_run(job))
    assert len(told) == 4
    for text, problem in zip(("0-3", "cannot be pinned", "export TMPDIR=/tmp", "TORCH_SYMMMEM=NVSHMEM"), told, strict=True):
        assert text in problem
    monkeypatch.setattr(run, "describe_run", describe("nccl_pad", "cuda"))
    assert problems(run.check_run(job)) == []


def test_what_a_library_needs_of_this_hosts_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus_odc.fsdp.choices.resolve_transport", lambda odc, device_type, machines: "mori")
    monkeypatch.setattr(run, "detect_nic", lambda: detect_nic(Path("/nonexistent")))
    keys = {"comm_backend": "odc_pad", "odc": {"interface": "eth77"}}
    monkeypatch.setattr(run, "describe_run", lambda job, thorough: run.Run(comm=parse_odc(keys), params={}, device_type="cuda", kind=None))
    job = Job(config="exp.yaml", ranks=16, nodes=2, facts={"gpus": 8})
    told = problems(run.check_run(job))
    assert len(told) == 2
    assert "odc.interface: eth77 does not exist" in told[0] and "no RDMA device of a known vendor" in told[1]
    keys["odc"] = {"nic": "mlx5"}
    finding = by_check(run.check_run(job))["transport"]
    assert finding.severity == "ok" and "mori (GPUs of 2 nodes)" in finding.found


class InPrimus:
    """An experiment that Primus would train, without a Primus."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params: dict[str, Any] = {}
        self.self_contained = False
        monkeypatch.setattr(run, "load_experiment", lambda *_, **__: self.experiment())
        monkeypatch.setattr("primus_odc.versions.require_primus", lambda: None)

    def experiment(self) -> Experiment:
        return Experiment(
            name="e",
            workspace=Path("w"),
            root=Path("w/e"),
            module_name="post_trainer",
            framework="megatron",
            params=self.params,
            env={},
            source=Path("e.yaml"),
            self_contained=self.self_contained,
        )


PRIMUS = Job(config="e.yaml", ranks=2, primus_path="/checkout", facts={"gpus": 1})


@pytest.fixture
def primus(monkeypatch: pytest.MonkeyPatch) -> InPrimus:
    return InPrimus(monkeypatch)


def test_what_primus_cannot_be_asked_for_is_told_with_the_missing_gpus(primus: InPrimus) -> None:
    """T27: what makes on demand impossible, all at once."""
    primus.params = {
        "stage": "odc_sft",
        "comm_backend": "odc_nopad",
        "use_torch_fsdp2": False,
        "use_distributed_optimizer": True,
        "pipeline_model_parallel_size": 2,
        "global_batch_size": 3,
        "micro_batch_size": 1,
        "seq_length": 64,
        "train_iters": 1,
        "lora": {"enabled": True},
    }
    told = "\n".join(problems(run.check_run(PRIMUS)))
    for key in (
        "use_torch_fsdp2",
        "use_distributed_optimizer",
        "pipeline_model_parallel_size",
        "lora.enabled",
        "micro_batch_size x ranks = 2",
        "GPUS_PER_NODE",
    ):
        assert key in told, told


@pytest.mark.parametrize("ranks", [1, 2])
def test_primus_on_a_host_without_a_gpu(primus: InPrimus, ranks: int) -> None:
    primus.params = {"stage": "odc_sft"}
    who = "the one process" if ranks == 1 else "each of 2 processes"
    told = "\n".join(problems(run.check_run(replace(PRIMUS, ranks=ranks, facts={"gpus": 0}))))
    assert f"Primus needs a GPU for {who} of this host and torch sees 0: train a self-contained YAML on the CPU" in told


def test_primus_without_us(primus: InPrimus) -> None:
    primus.params = {"stage": "sft"}
    found = by_check(run.check_run(PRIMUS))
    assert found["arm"].severity == "note" and "as without primus_odc" in found["arm"].found
    primus.params = {"stage": "odc_sft"}
    assert any("comm_backend is not set" in told for told in problems(run.check_run(PRIMUS)))


def test_a_self_contained_yaml_under_primus(primus: InPrimus) -> None:
    primus.self_contained = True
    (told,) = problems(run.check_run(PRIMUS))
    assert "Missing required module" in told and "unset PRIMUS_PATH" in told
