"""Checkpoints that a run cannot continue, and folders it cannot write to: told before any rank starts, with everything else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from primus_odc.errors import ConfigError
from primus_odc.megatron.checkpoint import checkpoint_folder
from primus_odc.megatron.command import prepare
from tests.megatron.run_cases import check_outputs, options, run, write_checkpoint, write_dialogues
from tests.workers import run_workers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dialogues(tmp_path / "dialogues.jsonl")
    return tmp_path


def told(folder: Path, *, thorough: bool = False, **changed: Any) -> list[str]:
    """What is wrong with a run ``other`` that has other keys; nothing where all is well."""
    try:
        check_outputs(options(folder, "odc_nopad", "other", **changed), thorough=thorough)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_checkpoint_of_another_run_is_told_with_all_that_differs(folder: Path) -> None:
    saved = str(write_checkpoint(folder / "saved", 3, options(folder, "odc_nopad", "run")))
    assert told(folder, load=saved) == []
    assert told(folder, load=saved, train_iters=9, log_interval=3, clip_grad=2.0) == []
    position, schedule, save = told(folder, load=saved, global_batch_size=4, seed=9, lr=0.25, save=str(folder / "dialogues.jsonl" / "x"))
    assert (
        position.startswith(f"{saved}/iter_0000003: ")
        and "global_batch_size was 5, is 4; seed was " in position
        and "is 9; resume with the same data" in position
    )
    assert "iter_0000003 was trained with another schedule: " in schedule and "0.25" in schedule and "override_opt_param" in schedule
    assert save.startswith(f"save: {folder}/dialogues.jsonl/x cannot be made, {folder}/dialogues.jsonl is no folder that can be written to")
    assert told(folder, load=saved, lr=0.25, override_opt_param_scheduler=True) == []


def _with_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        state = json.loads((source / "trainer.json").read_text())
        change(state)
        (source / "trainer.json").write_text(json.dumps(state))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda source: (source / "trainer.json").unlink(),
            "holds no trainer.json, so it is no checkpoint of primus-odc train; one",
        ),
        (shutil.rmtree, "no such checkpoint; set load to the folder it lies in"),
        (lambda source: (source / "__0_0.distcp").unlink(), "is not whole: __0_0.distcp of 1 files missing; set ckpt_step to another"),
        (lambda source: (source / ".metadata").unlink(), ".metadata cannot be read (FileNotFoundError: "),
        (lambda source: (source / ".metadata").write_bytes(b"no pickle"), ".metadata cannot be read ("),
        (_with_state(lambda state: state.update(parameters=[])), "trainer.json is damaged: parameters missing or of another kind; set"),
        (
            _with_state(lambda state: state["stream"].pop("consumed_samples")),
            "the saved data position is damaged: consumed_samples missing or of another kind",
        ),
        (
            _with_state(lambda state: state["scheduler"].pop("min_lr")),
            "trainer.json is damaged: its scheduler lacks 'min_lr'; set",
        ),
        (_with_state(lambda state: state.update(format=2)), "format 2, this release reads format 1"),
    ],
)
def test_what_is_no_whole_checkpoint_of_ours(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    saved = write_checkpoint(folder / "saved", 3, options(folder, "odc_nopad", "run"))
    damage(checkpoint_folder(saved, 3))
    (problem,) = told(folder, load=str(saved))
    assert said in problem


def test_the_folder_of_one_checkpoint_is_told_as_such(folder: Path) -> None:
    saved = write_checkpoint(folder / "saved", 30, options(folder, "odc_nopad", "run"))
    (problem,) = told(folder, load=str(saved / "iter_0000030"))
    assert problem.endswith(f"is one checkpoint; load names the folder it lies in: set load: {saved}, ckpt_step: 30")


def _of_a_real_run(rank: int, world_size: int, folder: Path) -> list[list[str]]:
    run(options(folder, "odc_nopad", "run", save=str(folder / "real"), exit_interval=1))
    dist.barrier()
    load = str(folder / "real")
    checks: list[dict[str, Any]] = [{}, {"ffn_hidden_size": 96, "seed": 3}, {"make_vocab_size_divisible_by": 100}]
    return [told(folder, thorough=True, load=load, **keys) for keys in checks]


def test_another_model_is_told_by_check(folder: Path) -> None:
    """With real shards of two ranks; in a process without a group one is taken for the while."""
    for good, ffn, more in run_workers(_of_a_real_run, 2, folder):
        assert good == []
        assert len(ffn) == 2 and "seed was" in ffn[0] and "holds another model: decoder.layers.0.mlp" in ffn[1]
        assert len(more) == 1 and "embedding.word_embeddings.weight: [264, 32] there, [300, 32] here" in more[0]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    assert not dist.is_initialized()
    assert told(folder, thorough=True, load=str(folder / "real")) == []
    (problem,) = told(folder, thorough=True, load=str(folder / "real"), num_layers=1)
    assert "holds another model" in problem and "absent here" in problem
    assert told(folder, load=str(folder / "real"), num_layers=1) == []  # the ranks of a run tell it when they have the model
    assert not dist.is_initialized() and os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_folders_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "file"
    file.touch()
    (cache,) = told(folder, data_cache_path=str(file / "cache"))
    assert cache.startswith(f"data_cache_path: {file}/cache cannot be made, {file} is no folder that can be written to; choose another")
    closed = folder / "closed"
    closed.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    assert told(folder, data_cache_path=str(closed)) == []  # what it holds may be all that is needed
    (save,) = told(folder, save=str(closed / "ckpt"))
    assert save == f"save: {closed}/ckpt cannot be made, {closed} is no folder that can be written to; choose another folder"
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    (workspace,) = told(folder)
    assert workspace.startswith(f"workspace: {folder}/other cannot be made, {folder} is no folder that can be written to")


def test_checkpoints_are_told_with_wrong_keys(folder: Path) -> None:
    smoke = Path(__file__).parents[2] / "configs" / "smoke.yaml"
    words = ["--comm_backend", "odc_pad", "--workspace", str(folder), "--trani_iters", "3", "--lr_warmup_iters", "30"]
    words += ["--load", str(folder / "gone"), "--save", str(folder / "dialogues.jsonl" / "x"), "--sft_max_samples", "4"]
    for thorough, count in ((False, 4), (True, 5)):
        with pytest.raises(ConfigError) as caught:
            prepare(str(smoke), words, thorough=thorough)
        assert len(caught.value.problems) == count, caught.value.problems
        for part in ("the warm-up of 30 steps", "trani_iters is not known", "gone is not there; a run that begins", "x cannot be made"):
            assert part in str(caught.value)
        assert ("global_batch_size: 8 is more than" in str(caught.value)) == thorough
