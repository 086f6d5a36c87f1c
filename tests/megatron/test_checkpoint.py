from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_odc.data import MinibatchStream
from primus_odc.errors import DataError
from primus_odc.megatron.arm import Arm
from primus_odc.megatron.checkpoint import LATEST, latest_step, load_checkpoint, save_checkpoint
from tests.megatron.arm_cases import everything, make_arm, minibatch_of
from tests.megatron.gpt_cases import make_samples

SAMPLES = make_samples((20, 9), seed=1)


def make_stream(batch: int = 2) -> MinibatchStream:
    return MinibatchStream(7, batch, 1, "data")


@pytest.fixture(scope="module")
def trained(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arm]:
    """A folder with the checkpoint of one step, and the arm as it was saved."""
    folder = tmp_path_factory.mktemp("checkpoints")
    arm, stream = make_arm("nccl_pad"), make_stream()
    stream.next()
    arm.train_step(minibatch_of(arm, 0, SAMPLES))
    assert save_checkpoint(folder, 1, arm, stream) == folder / "iter_0000001"
    return folder, arm


@pytest.mark.parametrize("name", ["nccl_pad", "odc_nopad"])
def test_everything_comes_back_bit_for_bit(trained: tuple[Path, Arm], name: str) -> None:
    folder, saved = trained
    arm, stream = make_arm(name), make_stream()
    generator = torch.get_rng_state()
    torch.rand(3)
    load_checkpoint(folder, 1, arm, stream)
    assert torch.equal(torch.get_rng_state(), generator)
    assert stream.consumed_samples == 2 and arm.trained_steps == 1
    assert arm.learning_rate == saved.learning_rate and arm.scheduler.state_dict() == saved.scheduler.state_dict()
    loaded, expected = everything(arm), everything(saved)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[key], expected[key]) for key in expected)
    arm.close()


def test_untrained_runs_can_be_saved_and_loaded(one_rank: None, tmp_path: Path) -> None:
    arm = make_arm("nccl_pad")
    save_checkpoint(tmp_path, 4, arm, make_stream())
    other = make_arm("nccl_pad")
    load_checkpoint(tmp_path, 4, other, make_stream())
    assert other.trained_steps == 0 and not other.optimizer.state
    # Not left over from a run that was there before.
    (tmp_path / "iter_0000004" / "stale").touch()
    save_checkpoint(tmp_path, 4, arm, make_stream())
    assert not (tmp_path / "iter_0000004" / "stale").exists() and not list(tmp_path.glob("*.partial"))


def test_refusals_say_what_differs(trained: tuple[Path, Arm], tmp_path: Path) -> None:
    folder, _ = trained
    arm = make_arm("nccl_pad")
    with pytest.raises(DataError, match="no such checkpoint"):
        load_checkpoint(folder, 2, arm, make_stream())
    with pytest.raises(DataError, match="global_batch_size was 2, is 3"):
        load_checkpoint(folder, 1, arm, make_stream(3))
    with pytest.raises(DataError, match=r"another model: decoder\.layers\.0.*\[\d+, \d+\] there"):
        load_checkpoint(folder, 1, make_arm("nccl_pad", ffn_hidden_size=32), make_stream())
    copy = tmp_path / "iter_0000001"
    shutil.copytree(folder / "iter_0000001", copy)
    state = json.loads((copy / "trainer.json").read_text())
    (copy / "trainer.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(DataError, match="format 99"):
        load_checkpoint(tmp_path, 1, arm, make_stream())
    for damaged in (b"{", b"[" * 100000, b"\xff", b"[]"):
        (copy / "trainer.json").write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            load_checkpoint(tmp_path, 1, arm, make_stream())


def _cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(1000)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda state: (state.pop("parameters"), state.update(trained_steps=None, stream=[])),
            "damaged: trained_steps, stream, parameters missing or of another kind; set ckpt_step to another checkpoint",
        ),
        (lambda state: state.update(scheduler={}), "damaged: its scheduler lacks"),
        (lambda state: state["stream"].update(consumed_samples="1"), "data position is damaged: consumed_samples missing or of another"),
        (lambda state: None, r"iter_0000001 cannot be read: rank 0: RuntimeError: .*; set ckpt_step to another checkpoint"),
    ],
    ids=["keys", "scheduler", "position", "tensors"],
)
def test_a_damaged_checkpoint_is_told_as_that(
    trained: tuple[Path, Arm], tmp_path: Path, damage: Callable[[dict[str, Any]], object], said: str
) -> None:
    copy = tmp_path / "iter_0000001"
    shutil.copytree(trained[0] / "iter_0000001", copy)
    state = json.loads((copy / "trainer.json").read_text())
    damage(state)
    (copy / "trainer.json").write_text(json.dumps(state))
    if "RuntimeError" in said:
        _cut(next(copy.glob("*.distcp")))
    with pytest.raises(DataError, match=said):
        load_checkpoint(tmp_path, 1, make_arm("nccl_pad"), make_stream())


def test_tensors_that_cannot_be_written_are_told(trained: tuple[Path, Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", full)
    with pytest.raises(DataError, match=r"cannot be written: rank 0: OSError: .*No space left on device; the one before it is still whole"):
        save_checkpoint(tmp_path, 1, trained[1], make_stream())


def test_latest_is_named_only_when_complete(trained: tuple[Path, Arm], tmp_path: Path) -> None:
    folder, _ = trained
    assert latest_step(folder) == 1
    assert latest_step(tmp_path) is None
    for damaged in (b"soon", b"\xff", b"1" * 5000, "\u00b2".encode()):
        (tmp_path / LATEST).write_bytes(damaged)
        with pytest.raises(DataError, match="ckpt_step"):
            latest_step(tmp_path)
    with pytest.raises(DataError, match="cannot be read: Not a directory"):
        latest_step(tmp_path / LATEST)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DataError, match="cannot be written"):
        save_checkpoint(blocked, 1, make_arm("nccl_pad"), make_stream())
