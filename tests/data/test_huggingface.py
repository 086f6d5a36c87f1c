from __future__ import annotations

import sys
from pathlib import Path

import pytest

from primus_odc.data.build import check_data
from primus_odc.data.huggingface import folder_source, hub_source
from primus_odc.errors import ConfigError, DataError


def jsonl(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


def texts(folder: Path, split: str = "train") -> list[tuple[str, str]]:
    return [(record.sample_id, record.turns[0].text) for record in folder_source(folder, split, "text")]


def test_jsonl_files_without_splits_are_all_read(tmp_path: Path) -> None:
    jsonl(tmp_path / "training_b.jsonl", "b")
    jsonl(tmp_path / "data/a.jsonl", "a")
    assert texts(tmp_path) == [("data/a.jsonl:1", "a"), ("training_b.jsonl:1", "b")]


def test_only_the_wanted_split_is_read(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-00000-of-00002.jsonl", "a")
    jsonl(tmp_path / "train-00001-of-00002.jsonl", "b")
    jsonl(tmp_path / "validation.jsonl", "v")
    jsonl(tmp_path / "tool-00000-of-00001.jsonl", "t")
    assert [text for _, text in texts(tmp_path)] == ["a", "b"]
    assert [text for _, text in texts(tmp_path, "tool")] == ["t"]
    with pytest.raises(DataError, match=r"no file of the split 'test'.*one of tool, train, validation"):
        texts(tmp_path, "test")
    jsonl(tmp_path / "more.jsonl", "m")
    with pytest.raises(DataError, match=r"'more\.jsonl' does not"):
        texts(tmp_path)


def test_an_empty_folder_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a folder written by save_to_disk, nor any \.parquet or \.jsonl"):
        folder_source(tmp_path, "train", "text")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"name of the hub.*pip install datasets"):
        hub_source("owner/name", "train", "conversation")
    with pytest.raises(ConfigError, match=r"name of the hub.*pip install datasets"):
        check_data({"sft_dataset_name": "owner/name", "tokenizer_type": "byte"})
    (tmp_path / "data.parquet").touch()
    with pytest.raises(DataError, match="pip install pyarrow"):
        folder_source(tmp_path, "train", "text")
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(DataError, match="pip install datasets"):
        folder_source(tmp_path, "train", "text")


def test_parquet_folder(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]} for i in range(300)]
    parquet.write_table(arrow.Table.from_pylist(chat), tmp_path / "train-00000-of-00001.parquet")
    source = folder_source(tmp_path, "train", "conversation")
    records = list(source)
    assert len(source) == len(records) == 300
    assert records[299].sample_id == "train-00000-of-00001.parquet:300"
    assert [(turn.role, turn.text) for turn in records[299].turns] == [("user", "Q299"), ("assistant", "A299")]


def test_saved_dataset_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"prompt": "P", "response": "R"}, {"prompt": "Q", "response": "S"}])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "two"))
    plain = folder_source(tmp_path / "one", "train", "conversation")
    assert [(r.sample_id, r.turns[1].text) for r in plain] == [("one[train]:0", "R"), ("one[train]:1", "S")]
    split = folder_source(tmp_path / "two", "test", "conversation")
    assert [(r.sample_id, r.turns[1].text) for r in split] == [("two[test]:0", "S")] and split.fingerprint != plain.fingerprint
    with pytest.raises(DataError, match=r"no split 'dev'.*one of test, train"):
        folder_source(tmp_path / "two", "dev", "conversation")
