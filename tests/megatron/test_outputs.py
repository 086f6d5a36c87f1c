"""Two runs with one folder of checkpoints: the second is refused, and what a killed run held is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from primus_odc._locks import FOLDER_LOCK
from primus_odc.errors import ConfigError, DataError
from primus_odc.megatron.outputs import hold_save
from primus_odc.megatron.trainer import train
from tests.megatron.gpt_cases import CPU
from tests.megatron.run_cases import check_outputs, options, run, write_dialogues

BUSY = r"a run that is still going on keeps its checkpoints in .*ckpt; save elsewhere, or wait for its end and continue it \(load\)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dialogues(tmp_path / "dialogues.jsonl")
    return tmp_path


def test_a_run_keeps_others_out_of_its_checkpoints(one_rank: None, folder: Path) -> None:
    keys = {"save": str(folder / "ckpt"), "save_interval": 1, "exit_interval": 2}
    first, other = options(folder, "nccl_pad", "first", **keys), options(folder, "nccl_pad", "other", lr=5e-3, **keys)
    again = options(folder, "nccl_pad", "first", load=str(folder / "ckpt"), **keys)
    steps: list[int] = []

    def meanwhile(minibatch: object, outcome: object) -> None:
        steps.append(len(steps))
        for opts in (other, again):
            with pytest.raises(ConfigError, match=BUSY):
                check_outputs(opts)
            with pytest.raises(DataError, match=BUSY):
                train(opts, CPU)

    train(first, CPU, meanwhile)
    assert steps == [0, 1]
    # It is over: continued by itself, and not written over by another, also where that one looked before there was anything.
    with pytest.raises(DataError, match="holds the checkpoint of step 2 of a run"):
        train(other, CPU)
    check_outputs(again)
    assert len(run(again)) == 2
    assert not (folder / "other").exists()


def test_a_killed_run_holds_nothing(one_rank: None, folder: Path) -> None:
    opts = options(folder, "nccl_pad", "run", save=str(folder / "ckpt"))
    (folder / "ckpt").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"]
        + [str(folder / "ckpt" / FOLDER_LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdin is not None
    with holder.stdin, holder.stdout:
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=BUSY):
            check_outputs(opts)
        with pytest.raises(DataError, match=BUSY), hold_save(opts.train):
            pass
        holder.kill()
        holder.wait(timeout=30)
    check_outputs(opts)
    with hold_save(opts.train):
        pass
