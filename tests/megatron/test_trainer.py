"""What the trainer says of its data before and while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_odc.errors import DataError
from primus_odc.report.logs import log_path
from tests.megatron.run_cases import options, run, write_dialogues


def test_a_batch_larger_than_the_data_is_refused_before_the_first_step(one_rank: None, tmp_path: Path) -> None:
    write_dialogues(tmp_path / "dialogues.jsonl", 4)
    with pytest.raises(DataError, match=r"global_batch_size: 5 is more than the 4 samples to train on.*set it to at most 4, or give more"):
        run(options(tmp_path, "nccl_pad", "large", sft_validation_fraction=0.0))
    assert not log_path(tmp_path / "large").exists()
    seen = run(options(tmp_path, "nccl_pad", "whole", sft_validation_fraction=0.0, global_batch_size=4, train_iters=2))
    assert [len(set(ids)) for ids, _ in seen] == [4, 4]


def test_fewer_validation_samples_than_asked_for_are_told(one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dialogues(tmp_path / "dialogues.jsonl")
    keys = {"train_iters": 1, "eval_interval": 1, "global_batch_size": 2}
    run(options(tmp_path, "nccl_pad", "once", eval_iters=1, **keys))
    assert "an evaluation has" not in caplog.text
    run(options(tmp_path, "nccl_pad", "many", eval_iters=50, **keys))
    assert caplog.text.count("an evaluation has each of the") == 1
    assert "validation samples once, which are fewer than eval_iters x global_batch_size = 100" in caplog.text
