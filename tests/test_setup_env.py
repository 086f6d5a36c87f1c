"""scripts/setup_env.sh: one environment, made once, with the right torch.

A shell script stands in for the interpreter: it writes down every call and plays `venv`, `pip` and `torch`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# $OFFER: where a CPU build is to be had (local, index or none). $BUILD: what torch says it is. Each line of $CALLS is one call.
FAKE_PYTHON = r"""#!/bin/bash
case "$*" in
    *platform.python_version*) echo "${VERSION:-3.11.7}"; exit "${TOO_OLD:-0}" ;;
    *require_torch*) [[ $BUILD != none ]] || exit 1; echo "2.11.0+rocm7.1" ;;
    *torch.version.hip*) echo "2.13.0 ${BUILD:-cpu}" ;;
    *sys.path*) echo /base/site-packages ;;
    *sysconfig*) echo "$(dirname "$0")" ;;
    '-m pip --version') ;;
    *'index versions torch'*)
        if [[ ${OFFER:-local} == local || ( $OFFER == index && $* == *--extra-index-url* ) ]]; then
            echo 'Available versions: 2.14.0, 2.13.0+cpu, 2.13.0'
        else
            echo 'Available versions: 2.13.0+cpu.post1, 2.13.0'
        fi ;;
    *) printf '%s\n' "$*" >>"$CALLS"
       case "$*" in
           '-m venv '*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
           *' install '*) sleep "${SLOW:-0}"; exit "${PIP_STATUS:-0}" ;;
       esac ;;
esac
"""


class Checkout:
    """A copy of the scripts and the fake interpreter."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        (self.root / "scripts").mkdir(parents=True)
        for script in ("setup_env.sh", "run_odc.sh", "test.sh"):
            shutil.copy(ROOT / "scripts" / script, self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.python = root / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.log = root / "calls"

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(self.python), "CALLS": str(self.log), "ODC_DEVICE": "cpu", **variables}
        command = ["bash", str(self.root / "scripts" / script), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit status and output."""
        process = self.start(script, *arguments, **variables)
        output, _ = process.communicate(timeout=50)
        return process.returncode, output

    def calls(self) -> list[str]:
        """The calls since the last look."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


QUICKSTART = "-m primus_odc compare configs/quickstart.yaml"


def test_first_start_installs_and_second_does_not(checkout: Checkout) -> None:
    status, output = checkout.run("run_odc.sh")
    assert status == 0, output
    venv, install, compare = checkout.calls()
    assert venv == f"-m venv {checkout.root}/.venv"
    assert install.endswith(f" install torch==2.13.0 --editable {checkout.root}[standalone,tokenizers]")
    assert compare == QUICKSTART

    assert checkout.run("run_odc.sh")[0] == 0
    assert checkout.calls() == [QUICKSTART]


def test_tests_add_their_extra_to_the_same_environment(checkout: Checkout) -> None:
    checkout.run("run_odc.sh")
    checkout.calls()
    status, output = checkout.run("test.sh", "-k", "some name")
    assert status == 0, output
    install, pytest_call = checkout.calls()
    assert install.endswith("[dev,standalone,tokenizers]")
    assert pytest_call == "-m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -k some name"
    checkout.run("run_odc.sh")
    assert checkout.calls() == [QUICKSTART]


def test_changed_requirements_are_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.run("test.sh")
    checkout.calls()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# another requirement\n")
    checkout.run("run_odc.sh")
    install, compare = checkout.calls()
    assert install.endswith("[dev,standalone,tokenizers]")
    assert compare == QUICKSTART


def test_another_interpreter_or_device_makes_it_anew(checkout: Checkout) -> None:
    checkout.run("run_odc.sh")
    for change in ({"VERSION": "3.12.1"}, {"ODC_DEVICE": "cuda", "BUILD": "cuda"}):
        checkout.calls()
        assert checkout.run("run_odc.sh", **change)[0] == 0
        assert checkout.calls()[0].startswith("-m venv ")


def test_a_failed_installation_is_not_taken_for_done(checkout: Checkout) -> None:
    assert checkout.run("run_odc.sh", PIP_STATUS="9")[0] == 9
    assert QUICKSTART not in checkout.calls()
    assert checkout.run("run_odc.sh")[0] == 0
    assert [" install " in call for call in checkout.calls()] == [True, False]


def test_two_starts_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start("run_odc.sh", SLOW="0.5") for _ in range(2)]
    outputs = [process.communicate(timeout=50)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    calls = checkout.calls()
    assert sum(" install " in call for call in calls) == 1
    assert calls.count(QUICKSTART) == 2


def test_an_environment_of_the_user_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / ".venv").mkdir()
    status, output = checkout.run("run_odc.sh")
    assert status == 2 and "was not made by this script" in output
    assert checkout.calls() == []


def test_another_torch_has_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.run("test.sh", TORCH="2.12.0", OFFER="none")
    venv, install, _ = checkout.calls()
    assert venv.endswith("/.venv-torch-2.12.0")
    assert " torch==2.12.0 " in install


@pytest.mark.parametrize(
    ("offer", "index", "notice"), [("local", False, False), ("index", True, False), ("none", False, True)], ids=["local", "index", "none"]
)
def test_the_cpu_index_is_named_only_where_it_is_needed_and_answers(checkout: Checkout, offer: str, index: bool, notice: bool) -> None:
    status, output = checkout.run("run_odc.sh", OFFER=offer)
    assert status == 0, output
    install = checkout.calls()[1]
    assert (f"--extra-index-url {CPU_INDEX} " in install) is index
    assert "torch==2.13.0 " in install
    assert ("several GB of CUDA libraries" in output) is notice


def test_cuda_takes_the_usual_build(checkout: Checkout) -> None:
    assert checkout.run("run_odc.sh", ODC_DEVICE="cuda", BUILD="cuda")[0] == 0
    install = checkout.calls()[1]
    assert "torch==" not in install and "index" not in install
    status, output = checkout.run("run_odc.sh", ODC_DEVICE="cuda", BUILD="cpu", TORCH="2.13.0")
    assert status == 2 and "is a cpu build" in output


def test_rocm_pins_the_torch_that_is_there(checkout: Checkout) -> None:
    status, output = checkout.run("run_odc.sh", ODC_DEVICE="rocm", BUILD="rocm")
    assert status == 0, output
    constraint = checkout.root / ".venv" / "primus-odc-constraint.txt"
    assert f" --constraint {constraint} --editable " in checkout.calls()[1]
    assert constraint.read_text() == "torch==2.11.0+rocm7.1\n"
    assert (checkout.root / ".venv/bin/primus-odc-base.pth").read_text() == "/base/site-packages\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ODC_DEVICE": "rocm", "BUILD": "none"}, "cannot be used (see above). A ROCm build of torch is never installed or replaced"),
        ({"ODC_DEVICE": "rocm", "BUILD": "rocm", "TORCH": "2.12.0"}, "torch on a ROCm machine is never replaced"),
        ({"ODC_DEVICE": "tpu"}, "ODC_DEVICE=tpu is not one of cpu, cuda, rocm"),
        ({"TORCH": "latest"}, "TORCH=latest is not a release"),
        ({"TOO_OLD": "1", "VERSION": "3.9.2"}, "is Python 3.9.2: 3.10 or newer is needed"),
    ],
)
def test_refusals_install_nothing(checkout: Checkout, variables: dict[str, str], message: str) -> None:
    status, output = checkout.run("run_odc.sh", **variables)
    assert status == 2, output
    assert message in output
    assert not any(" install " in call for call in checkout.calls())
