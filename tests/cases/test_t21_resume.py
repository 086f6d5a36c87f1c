"""T21: save at step 3 and resume, twice, also with another number of ranks and in another arm: the same samples and losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_odc.errors import ConfigError, DataError
from primus_odc.report.logs import read_step_log
from tests.megatron.run_cases import Seen, options, run, write_dialogues
from tests.workers import run_workers

WORLD = 2


def straight_and_resumed(rank: int, world_size: int, folder: Path) -> tuple[Seen, Seen, Seen]:
    straight = run(options(folder, "odc_nopad", "straight"))
    keys = {"save": str(folder / "ckpt"), "load": str(folder / "ckpt"), "exit_interval": 3}
    resumed = [step for _ in range(3) for step in run(options(folder, "odc_nopad", "resumed", **keys))]
    nothing_left = run(options(folder, "odc_nopad", "resumed", **keys))
    with pytest.raises(ConfigError, match="another schedule"):
        run(options(folder, "odc_nopad", "other", load=str(folder / "ckpt"), ckpt_step=3, lr=5e-3))
    with pytest.raises(DataError, match="global_batch_size was 5, is 4"):
        run(options(folder, "odc_nopad", "other", load=str(folder / "ckpt"), ckpt_step=3, global_batch_size=4))
    return straight, resumed, nothing_left


def continued(rank: int, world_size: int, folder: Path, arm: str) -> Seen:
    return run(options(folder, arm, f"{arm}-{world_size}", load=str(folder / "ckpt"), ckpt_step=3))


def assert_same(straight: Seen, other: Seen) -> None:
    assert [ids for ids, _ in straight] == [ids for ids, _ in other]
    for (_, expected), (_, loss) in zip(straight, other, strict=True):
        assert expected is not None and loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(150)  # three sets of processes
def test_resumed_runs_see_the_same_samples_and_losses(tmp_path: Path) -> None:
    write_dialogues(tmp_path / "dialogues.jsonl")
    straight, resumed, nothing_left = run_workers(straight_and_resumed, WORLD, tmp_path)[0]
    assert len(straight) == 9
    assert straight == resumed  # bit for bit, over two resumptions
    assert nothing_left == []
    logs = [read_step_log(tmp_path / name).steps for name in ("straight", "resumed")]
    assert [(s.step, s.loss, s.tokens) for s in logs[0]] == [(s.step, s.loss, s.tokens) for s in logs[1]]

    assert_same(straight[3:], run_workers(continued, 1, tmp_path, "odc_nopad")[0])
    # In another folder the log begins where the run goes on.
    log = read_step_log(tmp_path / "odc_nopad-1")
    assert log.header.first_step == 3 and [s.step for s in log.steps] == list(range(3, 9))
    assert_same(straight[3:], run_workers(continued, 3, tmp_path, "nccl_pad")[0])
