"""Runs of the real Primus on the CPU, each torchrun in processes of its own, under the shim of :mod:`tests.primus.cpu_shim`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from primus_odc.report.logs import StepLog, read_step_log

HERE = Path(__file__).resolve().parent
PRESETS = HERE.parents[1] / "primus_odc" / "primus" / "presets"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """A run that has ended."""

    code: int
    """Exit status of torchrun."""
    output: str
    """Of all ranks, without colours."""
    folder: Path
    """Of the experiment."""

    def log(self) -> StepLog:
        """The step log, of a run that went well."""
        assert self.code == 0, self.tail()
        return read_step_log(self.folder)

    def printed(self) -> str:
        """What Primus and Megatron wrote below the level of the console, all ranks."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("logs/*/rank-*/debug.log")))

    def tail(self) -> str:
        """What to look at when the run went wrong."""
        errors = [line for line in self.output.splitlines() if "ERROR" in line or "Error" in line]
        return "\n".join([*errors[-20:], *self.output.splitlines()[-40:]])


@dataclass(kw_only=True, slots=True, frozen=True)
class Primus:
    """A Primus and a Megatron, and where runs go."""

    path: Path
    megatron: Path
    helpers: Path
    """Folder of Megatron's compiled data helpers."""
    workspace: Path

    def run(
        self, ranks: int, preset: str, *words: str, name: str, arm: str = "odc_nopad", timeout_s: float = 240.0, **variables: str
    ) -> Job:
        """Train ``preset``, or the file of that path, with overrides ``words`` as experiment ``name``-``arm``."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PRIMUS", "MASTER", "TORCHELASTIC"))},
            "PRIMUS_PATH": str(self.path),
            "BACKEND_PATH": str(self.megatron),
            "MEGATRON_HELPERS": str(self.helpers),
            "PRIMUS_WORKSPACE": str(self.workspace),
            "PRIMUS_EXP_NAME": name,
            "ODC_ARM": arm,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        kind = "pretrain" if "pretrain" in preset else "posttrain"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks), str(HERE / "cpu_primus.py"), "train", kind]
        command += ["--config", str(PRESETS / preset), "--distributed_backend", "gloo", *words]
        process = subprocess.Popen(
            command,
            cwd=self.workspace,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end in {timeout_s:g} s:\n{output[-4000:]}") from None
        folder = self.workspace / "primus_odc" / "local" / f"{name}-{arm}"
        return Job(code=process.returncode, output=_COLOUR.sub("", output), folder=folder)


def native_metrics(job: Job) -> list[tuple[str, str]]:
    """(loss, gradient norm) of every iteration as Megatron printed them, to the last digit."""
    assert job.code == 0, job.tail()
    return re.findall(r"lm loss: (\S+) \|.*?grad norm: (\S+) \|", job.printed())
