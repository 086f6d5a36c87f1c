"""`primus-odc train` as a user starts it: real processes, real text."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from primus_odc.report.logs import read_step_log

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
TIMEOUT_S = 100


def environment(workspace: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PRIMUS_WORKSPACE": str(workspace), "PYTHONWARNINGS": "ignore"}


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_smoke_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    words = (
        "--comm_backend",
        "odc_nopad",
        "--sft_max_samples",
        "300",
        "--sft_validation_fraction",
        "0.1",
        "--save",
        str(tmp_path / "ckpt"),
        "odc.timeout_s=40",
    )
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "primus_odc", "train", str(SMOKE), *words],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for part in ("arm odc_nopad on 2 ranks", "3 FSDP2 units", "step 3/3 | loss", "validation after step 3", "saved"):
        assert done.stdout.count(part) == 1, (part, done.stdout)
    log = read_step_log(tmp_path / "primus_odc" / "local" / "smoke")
    assert log.header.arm == "odc_nopad" and log.header.world_size == 2 and not log.torn
    losses = [step.loss for step in log.steps]
    assert len(losses) == 3 and all(loss is not None and 4 < loss < 7 for loss in losses)
    assert all(step.ms > 0 and len(step.microbatches) == 2 and len(step.waited_s) == 2 for step in log.steps)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "3\n"


FAILING = """
import os, sys
from primus_odc.megatron import arm
original = arm.Arm.train_step
def train_step(self, minibatch, recorder=None):
    if self.rank == 1 and minibatch.step == 1:
        raise RuntimeError("broken on purpose")
    return original(self, minibatch, recorder)
arm.Arm.train_step = train_step
from primus_odc.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_failing_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    # Without torchrun, which would end the other rank itself.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**environment(tmp_path), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = (str(SMOKE), "--comm_backend", "odc_pad", "--sft_max_samples", "300", "--sft_validation_fraction", "0.1", "odc.timeout_s=40")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, *words],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [2, 1], errors
    assert "broken on purpose" in errors[1] and "Traceback" in errors[1]
    assert "PeerError" in errors[0] and "rank 1" in errors[0], errors[0]
