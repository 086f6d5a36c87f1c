"""scripts/run_odc.sh with a config: what it refuses, what it starts, and that it installs nothing.

A stub of the package's launcher of torchrun that writes down its arguments stands in for the real one, which
tests/megatron/test_launcher.py tries; the interpreter is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

STUB_RUN = """
import json, os, sys
print("STARTED", json.dumps(sys.argv[1:]))
print("THREADS", os.environ["OMP_NUM_THREADS"])
sys.exit(int(os.environ.get("STUB_EXIT", "0")))
"""

STUB_CHECK = """
import json, os, sys
print("CHECKED", json.dumps(sys.argv[1:]))
sys.exit(int(os.environ.get("STUB_CHECK_EXIT", "0")))
"""


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python finds the stubs and nothing else."""
    for package in ("torch", "primus_odc", "primus_odc/megatron"):
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.py").touch()
    (tmp_path / "stubs/primus_odc/megatron/launcher.py").write_text(STUB_RUN)
    (tmp_path / "stubs/primus_odc/__main__.py").write_text(STUB_CHECK)
    (tmp_path / "config.yaml").touch()
    # Without site-packages, where the real ones lie.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return {"PATH": os.environ["PATH"], "PYTHON": str(python), "PYTHONPATH": str(tmp_path / "stubs")}


@pytest.fixture
def launch(tmp_path: Path, stubs: dict[str, str]) -> Launch:
    """Runs run_odc.sh in an environment of its own; `devices` is what the stub torch says it sees, `cores` what the process may use,
    keywords are environment variables."""

    def run(*arguments: str, devices: int = 0, cores: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "stubs/torch/__init__.py").write_text(
            f"import os\nos.sched_getaffinity = lambda pid: set(range({cores}))\n"
            f"class cuda:\n    device_count = staticmethod(lambda: {devices})\n"
        )
        environment = {**stubs, **variables}
        command = ["bash", str(ROOT / "scripts" / "run_odc.sh"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)

    return run


def started(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The arguments that torchrun was started with."""
    line = next(line for line in result.stdout.splitlines() if line.startswith("STARTED "))
    arguments: list[str] = json.loads(line.removeprefix("STARTED "))
    return arguments


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse_and_are_strict(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=50)
    assert script.name == "setup_env.sh" or "\nset -euo pipefail\n" in script.read_text()


def test_help_explains_the_variables(launch: Launch) -> None:
    result = launch("--help", PRIMUS_PATH="/somewhere")
    assert result.returncode == 0
    for word in ("CONFIG.yaml", "GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON", "TORCH", "ODC_SKIP_DOCTOR"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--steps", "3"], {}, "the first argument is a config, not --steps"),
        ([""], {}, "the config's name is empty"),
        (["absent.yaml"], {}, "no such config: absent.yaml"),
        (["config.yaml"], {"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE=0 is not a number from 1"),
        (["config.yaml"], {"GPUS_PER_NODE": "two"}, "GPUS_PER_NODE=two is not a number"),
        (["config.yaml"], {"GPUS_PER_NODE": "08"}, "GPUS_PER_NODE=08 is not a number"),
        (["config.yaml"], {"NNODES": "1:4"}, "NNODES=1:4 is not a number"),
        (["config.yaml"], {"NODE_RANK": "1"}, "NODE_RANK=1 is not a number from 0 to 0"),
        (["config.yaml"], {"NNODES": "2", "MASTER_ADDR": "localhost", "NODE_RANK": "2"}, "NODE_RANK=2 is not a number from 0 to 1"),
        (["config.yaml"], {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        (["config.yaml"], {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a number from 1 to 65535"),
        (["config.yaml"], {"PYTHON": "no-such-python"}, "PYTHON=no-such-python is not a program"),
        (["config.yaml"], {"PRIMUS_PATH": "/somewhere"}, "PRIMUS_PATH=/somewhere is no checkout of Primus"),
        ([], {"PRIMUS_PATH": "/somewhere"}, "PRIMUS_PATH is set, and Primus needs a config"),
    ],
)
def test_refusals_start_nothing(launch: Launch, arguments: list[str], variables: dict[str, str], message: str) -> None:
    result = launch(*arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert "STARTED" not in result.stdout


def test_one_node_takes_a_free_port_and_passes_overrides_on(launch: Launch) -> None:
    result = launch("config.yaml", "--train_iters", "5", "--name", "two words", GPUS_PER_NODE="3")
    assert result.returncode == 0, result.stderr
    own = ["-m", "primus_odc", "train", "config.yaml", "--train_iters", "5", "--name", "two words"]
    assert started(result) == ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "3", *own]


def test_everything_is_checked_before_any_process_starts(launch: Launch) -> None:
    result = launch("config.yaml", "--train_iters", "5", NNODES="3", MASTER_ADDR="node-0", GPUS_PER_NODE="2")
    first = result.stdout.splitlines()[0]
    words = ["doctor", "config.yaml", "--quiet", "--ranks", "6", "--nodes", "3", "--time-limit", "120", "--train_iters", "5"]
    assert first.startswith("CHECKED ") and json.loads(first.removeprefix("CHECKED ")) == words
    result = launch("config.yaml", STUB_CHECK_EXIT="1")
    assert result.returncode == 2 and "STARTED" not in result.stdout


def test_ctrl_c_during_the_check_is_no_problem_that_it_found(launch: Launch) -> None:
    result = launch("config.yaml", STUB_CHECK_EXIT="130")
    assert result.returncode == 130 and "STARTED" not in result.stdout


def test_the_check_can_be_skipped(launch: Launch) -> None:
    result = launch("config.yaml", STUB_CHECK_EXIT="1", ODC_SKIP_DOCTOR="1")
    assert result.returncode == 0 and "CHECKED" not in result.stdout
    assert started(result)


@pytest.mark.parametrize(("module", "word"), [("pre_trainer", "pretrain"), ("post_trainer", "posttrain")])
def test_primus_runs_the_config_where_its_path_is_given(launch: Launch, tmp_path: Path, module: str, word: str) -> None:
    (tmp_path / "config.yaml").write_text(f"modules:\n  {module}:\n    framework: megatron\n")
    (tmp_path / "checkout/primus/cli").mkdir(parents=True)
    (tmp_path / "checkout/primus/cli/main.py").touch()
    result = launch("config.yaml", "--train_iters", "5", GPUS_PER_NODE="3", PRIMUS_PATH=str(tmp_path / "checkout"), STUB_EXIT="7")
    assert result.returncode == 7, result.stderr
    own = ["-m", "primus_odc.primus.launch", "train", word, "--config", "config.yaml", "--train_iters", "5"]
    assert started(result) == ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "3", *own]


@pytest.mark.parametrize(("variables", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "5"}, "5")])
def test_one_process_has_the_threads_of_several(launch: Launch, variables: dict[str, str], threads: str) -> None:
    result = launch("config.yaml", GPUS_PER_NODE="1", **variables)
    assert f"THREADS {threads}\n" in result.stdout, result.stderr


def test_several_nodes_meet_at_the_master(launch: Launch) -> None:
    result = launch("config.yaml", GPUS_PER_NODE="8", NNODES="4", NODE_RANK="3", MASTER_ADDR="node-0", MASTER_PORT="1234")
    rendezvous = ["--nnodes", "4", "--node-rank", "3", "--master-addr", "node-0", "--master-port", "1234"]
    assert started(result)[: len(rendezvous)] == rendezvous


SRUN = """#!/usr/bin/env bash
# Stands in for srun: runs the task of each node here, one after the other; the job fails as its last failing task does.
[[ $1 == --ntasks-per-node=1 ]] || exit 9
shift
status=0
for node in 0 1; do SLURM_NODEID=$node "$@" || status=$?; done
exit "$status"
"""


@pytest.mark.parametrize("status", [0, 7])
def test_the_lines_for_slurm_start_every_node(tmp_path: Path, stubs: dict[str, str], status: int) -> None:
    """Those of docs/reproduce.md, as they stand there."""
    page = (ROOT / "docs" / "reproduce.md").read_text()
    lines = page.partition("Under Slurm")[2].partition("```bash\n")[2].partition("```")[0]
    assert "srun" in lines
    for name, text in (("srun", SRUN), ("scontrol", "#!/usr/bin/env bash\nprintf 'node-0\\nnode-1\\n'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "stubs/torch/__init__.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 8)\n")
    (tmp_path / "sft_deepseek_r1_distill_qwen_14B.yaml").touch()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environment = {**stubs, "PATH": f"{tmp_path}:{stubs['PATH']}", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"PRIMUS_ODC_PRESETS": str(tmp_path), "STUB_EXIT": str(status)}
    result = subprocess.run(["bash", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert result.returncode == status, result.stderr
    nodes = [json.loads(line.removeprefix("STARTED ")) for line in result.stdout.splitlines() if line.startswith("STARTED ")]
    for rank, arguments in enumerate(nodes):
        shared = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "node-0", "--master-port", "29500"]
        assert arguments[:10] == [*shared, "--nproc-per-node", "8"]
    assert len(nodes) == 2


def test_a_given_port_is_used_on_one_node_too(launch: Launch) -> None:
    result = launch("config.yaml", MASTER_PORT="1234")
    assert started(result)[4:8] == ["--master-addr", "127.0.0.1", "--master-port", "1234"]


@pytest.mark.parametrize(("devices", "cores", "expected"), [(0, 1, 1), (0, 2, 2), (0, 4, 4), (0, 64, 4), (1, 64, 1), (8, 2, 8)])
def test_process_count_is_the_gpus_else_up_to_four_cores(launch: Launch, devices: int, cores: int, expected: int) -> None:
    arguments = started(launch("config.yaml", devices=devices, cores=cores))
    assert arguments[arguments.index("--nproc-per-node") + 1] == str(expected)


def test_exit_status_is_that_of_the_job(launch: Launch) -> None:
    assert launch("config.yaml", STUB_EXIT="7").returncode == 7


def test_missing_packages_are_named_and_not_installed(launch: Launch, tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    result = launch("config.yaml", PYTHON=str(bare))
    assert result.returncode == 2
    assert f"{bare} has no primus_odc and torch, and a run with a config installs nothing" in result.stderr
    calls = (tmp_path / "calls").read_text()
    assert calls.startswith("-c ") and "-m" not in calls.split()


@pytest.mark.parametrize("script", ["run_odc.sh", "test_gpu.sh", "test_shmem.sh"])
def test_every_script_takes_the_interpreter_that_is_meant(script: str, tmp_path: Path) -> None:
    changed = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PRIMUS_PATH": "", "PYTHON": "", "OUT": str(tmp_path / "out")}
    (tmp_path / "python").write_text("#!/bin/sh\necho the python at hand >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    words = [str(ROOT / "scripts" / script), *(["configs/smoke.yaml"] if script == "run_odc.sh" else [])]
    result = subprocess.run(["bash", *words], env={**os.environ, **changed}, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert result.returncode != 0 and "the python at hand" in result.stderr


def test_the_gpu_tests_are_refused_where_torch_sees_no_gpu(tmp_path: Path) -> None:
    changed = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    script = ROOT / "scripts" / "test_gpu.sh"
    result = subprocess.run(["bash", str(script)], env={**os.environ, **changed}, capture_output=True, text=True, timeout=50)
    assert result.returncode == 2 and "torch sees no GPU" in result.stderr and "set PYTHON" in result.stderr
