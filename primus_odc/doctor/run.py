"""Stage ``run``: is this YAML possible, on this machine? Runs in the child process: it imports torch, megatron-core and Primus' loader."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from primus_odc._problems import Problems
from primus_odc._words import counted
from primus_odc.config import OdcConfig, ParsedComm, parse_odc
from primus_odc.data.enough import require_samples
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.system import temporary_folder_problem
from primus_odc.errors import ConfigError, OdcError
from primus_odc.experiment import Experiment, load_experiment
from primus_odc.primus.refusals import Kind, check
from primus_odc.symmetric.bootstrap import choose
from primus_odc.symmetric.host import require_host_transport
from primus_odc.symmetric.shmem.code_object import detect_nic


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """What the YAML asks for; it passed every check that is made before a rank starts."""

    comm: ParsedComm
    params: dict[str, Any]
    device_type: Literal["cpu", "cuda"]
    kind: Kind | None
    """Which trainer of Primus; None: the standalone trainer."""

    @property
    def on_demand(self) -> bool:
        """Whether the engine takes part."""
        return self.comm.arm.startswith("odc")


def check_run(job: Job) -> list[Finding]:
    """The YAML's keys, its arm and the transport."""
    try:
        run = describe_run(job, thorough=True)
    except ConfigError as error:
        return [Finding(check="configuration", severity="problem", found=problem) for problem in error.problems]
    except OdcError as error:
        return [Finding(check="configuration", severity="problem", found=str(error))]
    trainer = "Primus" if job.primus_path else "the standalone trainer"
    findings = [Finding(check="configuration", severity="ok", found=f"{job.config} can be trained by {trainer}")]
    if run.comm.arm == "stock":
        return [*findings, Finding(check="arm", severity="note", found="comm_backend is not set: Primus trains as without primus_odc")]
    ranks = f"{counted(job.world(), 'rank')} on {counted(job.nodes, 'node')}"
    findings.append(
        Finding(check="arm", severity="ok", found=f"{run.comm.arm}, {ranks}", details={"arm": run.comm.arm, "ranks": job.world()})
    )
    return [*findings, *_check_transport(job, run)]


def describe_run(job: Job, *, thorough: bool = False) -> Run:
    """The run that ``job.config`` asks for; ``thorough``: samples are read until there are enough for a step.

    Raises:
        ConfigError: all that keeps it from starting.
        VersionError: torch, megatron-core or Primus outside the tested range.
    """
    assert job.config is not None
    # As torchrun tells its processes: checks of the trainers read it.
    os.environ["LOCAL_WORLD_SIZE"] = str(job.local_world())
    if job.primus_path:
        return _in_primus(job, job.config, job.primus_path, thorough)
    return _standalone(job.config, job.overrides, thorough)


def _standalone(config: str, overrides: Sequence[str], thorough: bool) -> Run:
    from primus_odc.megatron.command import prepare

    options = prepare(config, overrides, thorough=thorough)
    device_type: Literal["cpu", "cuda"] = "cpu" if options.train.distributed_backend == "gloo" else "cuda"
    return Run(comm=options.comm, params=options.params, device_type=device_type, kind=None)


def _in_primus(job: Job, config: str, primus_path: str, thorough: bool) -> Run:
    experiment = load_experiment(config, job.overrides, primus_path=primus_path)
    os.environ.update(experiment.env)
    if experiment.self_contained:
        raise ConfigError(
            [
                f"{config} is self-contained, which Primus 26.5 loads and then does not find (Missing required module): unset PRIMUS_PATH "
                "to train it with the standalone trainer, or give its module the keys config and model, as the presets of primus_odc do"
            ]
        )
    params = {**experiment.params, "world_size": job.world()}
    kind = _kind(experiment)
    problems = Problems()
    if params.get("comm_backend") is not None or params.get("stage") == f"odc_{kind}":
        arguments = SimpleNamespace(**{key: _namespace(value) for key, value in params.items()})
        checked = problems.of(lambda: check(arguments, kind))
        problems.of(lambda: _require_gpus(job))
        comm = checked.comm if checked is not None else None
        if thorough and kind == "sft" and checked is not None:
            evaluates = bool(params.get("eval_iters"))
            problems.of(lambda: require_samples(checked.params, params["global_batch_size"], evaluates=evaluates))
    else:
        comm = problems.of(lambda: parse_odc(params))
    if kind == "pretrain":
        problems.of(_require_data_helpers)
    problems.raise_any()
    assert comm is not None
    return Run(comm=comm, params=params, device_type="cuda", kind=kind)


def _require_data_helpers() -> None:
    """Megatron's datasets need a compiled module. Megatron makes it when it starts, but not under Primus (disable_compile_dependencies),
    of which only primus-cli makes it, in a hook. Without it a run ends late, with "MockGPTDataset failed to build" or a missing module."""
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        return  # told by the check of Megatron-LM
    folder = Path(found.origin).parent / "datasets"
    if not any((folder / f"helpers_cpp{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        module = f"helpers_cpp{EXTENSION_SUFFIXES[0]}"
        problem = f"{folder} has no {module}, which Megatron's datasets for pretraining need and Primus does not compile"
        raise ConfigError([f"{problem}: run make -C {folder} (needs a C++ compiler and pip install pybind11)"])


def _kind(experiment: Experiment) -> Kind:
    stage = str(experiment.params.get("stage") or "")
    if stage:
        return "sft" if stage.endswith("sft") else "pretrain"
    return "pretrain" if experiment.module_name.startswith("pre") else "sft"


def _namespace(value: Any) -> Any:
    """Blocks as Primus hands them out."""
    return SimpleNamespace(**{str(key): _namespace(item) for key, item in value.items()}) if isinstance(value, dict) else value


def _require_gpus(job: Job) -> None:
    seen = job.facts.get("gpus")  # absent where the stage that counts them did not end
    if seen is not None and seen < job.local_world():
        from primus_odc.megatron.run_options import missing_gpus

        lack, fewer = missing_gpus(job.local_world(), seen)
        advice = f"{fewer}train a self-contained YAML on the CPU (distributed_backend: gloo, PRIMUS_PATH unset)"
        raise ConfigError([f"Primus {lack}: {advice}"])


def _check_transport(job: Job, run: Run) -> list[Finding]:
    if not run.on_demand:
        library = "gloo" if run.device_type == "cpu" else "NCCL or RCCL"
        return [Finding(check="transport", severity="ok", found=f"collectives ({library}); none of the engine's")]
    from primus_odc.fsdp.choices import resolve_transport

    problems: list[str] = []
    try:
        transport = resolve_transport(run.comm.odc, run.device_type, job.nodes)
        require_host_transport()
    except ConfigError as error:
        return [Finding(check="transport", severity="problem", found=problem) for problem in error.problems]
    except OdcError as error:
        problems.append(str(error))
        transport = "host"
    if transport == "symm_mem" and job.world() > 1:
        problems += _symmetric_memory_problems(job)
    elif transport in ("nvshmem", "mori"):
        problems += _library_problems(run.comm.odc, transport)
    if problems:
        return [Finding(check="transport", severity="problem", found=problem) for problem in problems]
    where = {"host": "CPU tensors of one host", "symm_mem": "GPUs of one node"}.get(transport, f"GPUs of {job.nodes} nodes")
    return [Finding(check="transport", severity="ok", found=f"{transport} ({where})", details={"transport": transport})]


def _library_problems(odc: OdcConfig, transport: str) -> list[str]:
    """What of the network of this host does not go with the keys."""
    problems = Problems()
    if odc.interface is not None:
        interface = odc.interface
        problems.of(lambda: choose(interface, ("", 0)))
    if transport == "mori" and odc.nic is None:
        problems.of(detect_nic)
    return problems.found


def _symmetric_memory_problems(job: Job) -> list[str]:
    problems: list[str] = []
    if missing := job.facts.get("no_p2p"):
        problems.append(
            f"odc.transport: symm_mem needs peer access between GPUs, missing: {', '.join(missing)}; set comm_backend: nccl_pad"
        )
    if reason := job.facts.get("stream_words"):
        problems.append(f"odc.transport: symm_mem: {reason}")
    if reason := temporary_folder_problem(os.environ):
        problems.append(f"{reason}: export TMPDIR=/tmp")
    backend = os.environ.get("TORCH_SYMMMEM", "CUDA")
    if backend != "CUDA":
        problems.append(f"TORCH_SYMMMEM={backend} gives symmetric memory that was never tried: unset it")
    return problems
