from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primus_odc.data import MinibatchStream, TokenDataset, build_dataset, build_tokenizer
from primus_odc.data.build import Split, in_validation
from primus_odc.errors import ConfigError, DataError

BOS, EOS = 257, 258


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"prompt": "Q" * i, "response": "R" * (i % 7)} for i in range(1, 40)]
    rows.append({"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]})
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(path: object, workspace: Path, split: Split = "train", over: str = "error", cap: int = 10_000, **keys: Any) -> TokenDataset:
    params = {"sft_dataset_name": str(path), "tokenizer_type": "byte", **keys}
    return build_dataset(params, split, workspace=workspace, max_tokens=cap, over_length=over)  # type: ignore[arg-type]


def test_jsonl_end_to_end(chat: Path, tmp_path: Path) -> None:
    dataset = build(chat, tmp_path)
    assert len(dataset) == 40 and dataset.ids[0] == "chat.jsonl:1"
    expected = "<|im_start|>user\nQQ<|im_end|>\n<|im_start|>assistant\n"
    assert dataset[1].tokens.tolist() == [BOS, *expected.encode(), *b"RR", EOS]
    assert dataset.target_counts.tolist() == [i % 7 + 1 for i in range(1, 40)] + [2]
    assert (tmp_path / "token_cache").is_dir()


def test_another_cap_or_split_needs_no_new_cache(chat: Path, tmp_path: Path) -> None:
    build(chat, tmp_path)
    build(chat, tmp_path, over="truncate", cap=60, sft_validation_fraction=0.3)
    build(chat, tmp_path, split="validation", sft_validation_fraction=0.3)
    assert len(list((tmp_path / "token_cache").glob("*.lock"))) == 1
    build(chat, tmp_path, sft_max_samples=3)
    assert len(list((tmp_path / "token_cache").glob("*.lock"))) == 2


def test_data_cache_path_wins_over_the_workspace(chat: Path, tmp_path: Path) -> None:
    build(chat, tmp_path / "workspace", data_cache_path=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) and not (tmp_path / "workspace").exists()


def test_error_names_the_sample_the_cap_and_both_ways_out(chat: Path, tmp_path: Path) -> None:
    longest = int(build(chat, tmp_path).lengths.max())
    build(chat, tmp_path, cap=longest)
    with pytest.raises(DataError) as error:
        build(chat, tmp_path, cap=longest - 1)
    for part in (
        f"'chat.jsonl:39' ({longest} tokens)",
        f"cap of {longest - 1} tokens",
        "max_tokens_per_microbatch",
        "over_length: truncate",
    ):
        assert part in str(error.value)


def test_short_samples_are_left_out_and_counted(chat: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = build(chat, tmp_path)
    shortest = int(np.median(whole.lengths))
    with caplog.at_level(logging.WARNING):
        kept = build(chat, tmp_path, sft_min_tokens=shortest)
    assert sorted(kept.ids) == sorted(i for i, n in zip(whole.ids, whole.lengths, strict=True) if n >= shortest)
    assert f"{40 - len(kept)} of 40 samples left out" in caplog.text
    with pytest.raises(DataError, match="sft_min_tokens 100000"):
        build(chat, tmp_path, sft_min_tokens=100_000)


def test_truncate_keeps_the_first_tokens_and_reports(chat: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = build(chat, tmp_path)
    with caplog.at_level(logging.WARNING):
        cut = build(chat, tmp_path, over="truncate", cap=60)
    assert cut.truncated == (whole.lengths > 60).sum() > 0 and cut.lengths.max() == 60
    assert f"{cut.truncated} of 40 samples truncated to their first 60 tokens" in caplog.text
    for before, after in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(before.tokens[:60], after.tokens)
        np.testing.assert_array_equal(before.target_mask[:60], after.target_mask)


def test_training_data_without_any_target_are_refused(tmp_path: Path) -> None:
    def chats(*replies: int) -> Path:
        path = tmp_path / f"asked{len(replies)}.jsonl"
        asked, reply = {"role": "user", "content": "U" * 50}, {"role": "assistant", "content": "A"}
        rows = [{"messages": [asked, reply] if i in replies else [asked]} for i in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    with pytest.raises(DataError, match=r"asked0\.jsonl: none of the 20 samples .* target token; loss is taken on replies only") as error:
        build(chats(), tmp_path)
    assert "samples are cut" not in str(error.value)
    one = build(chats(7), tmp_path)
    assert one.target_counts.tolist() == [2 if i == 7 else 0 for i in range(20)]
    with pytest.raises(DataError, match=r"; samples are cut to 40 tokens \(20 of them were\): raise odc\.max_tokens_per_microb"):
        build(chats(7), tmp_path, over="truncate", cap=40)
    held_out = build(chats(), tmp_path, split="validation", sft_validation_fraction=0.5)
    assert held_out.target_counts.sum() == 0, "only what is trained on is asked for targets"
    (tmp_path / "short.jsonl").write_text('{"text": "long"}\n')
    with pytest.raises(DataError, match="loss is taken on every token of a document but its first; samples are cut to"):
        build(tmp_path / "short.jsonl", tmp_path, over="truncate", cap=1, sft_conversation_format="text")


def test_train_and_validation_share_nothing_and_stay(chat: Path, tmp_path: Path) -> None:
    train = build(chat, tmp_path, sft_validation_fraction=0.3)
    held_out = build(chat, tmp_path, split="validation", sft_validation_fraction=0.3)
    assert len(train) + len(held_out) == 40 and not set(train.ids) & set(held_out.ids)
    more = build(chat, tmp_path, split="validation", sft_validation_fraction=0.5)
    assert set(held_out.ids) < set(more.ids)
    # First 8 bytes of sha256("chat.jsonl:1") are 0x665e..., hence 0.3999 of the range.
    assert not in_validation("chat.jsonl:1", 0.3998) and in_validation("chat.jsonl:1", 0.4000)
    assert in_validation("json/decoder.py#0", 0.5) == in_validation("json/decoder.py#17", 0.5) == in_validation("json/decoder.py", 0.5)
    with pytest.raises(DataError, match=r"the validation part of .* is empty: 40 samples"):
        build(chat, tmp_path, split="validation")


def test_stdlib_as_text_and_as_conversation(tmp_path: Path) -> None:
    text = build("stdlib", tmp_path, cap=10**6, sft_max_samples=50)
    assert len(text) == 50 and (text.target_counts == text.lengths - 1).all()
    plain = build("stdlib", tmp_path, cap=10**6, sft_max_samples=50, sft_conversation_format="plain")
    assert (plain.lengths == text.lengths).all() and (plain.target_counts < text.target_counts).all() and plain.target_counts.min() > 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stdlb", "'stdlb': no such path.*did you mean stdlib"),
        ("{dir}/caht.jsonl", r"did you mean .*/chat\.jsonl"),
        ("data/absent.jsonl", "no such path"),
        ("{dir}/notes.txt", r"a file must end in \.jsonl or \.parquet"),
    ],
)
def test_a_wrong_name_gets_the_nearest(chat: Path, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=reason):
        build(name.format(dir=tmp_path), tmp_path)


def test_a_run_saved_and_resumed_twice_sees_the_same_sample_ids(chat: Path, tmp_path: Path) -> None:
    def opened() -> tuple[TokenDataset, MinibatchStream]:
        dataset = build(chat, tmp_path)
        return dataset, MinibatchStream(len(dataset), 16, 3, dataset.fingerprint)

    def ids(dataset: TokenDataset, stream: MinibatchStream, steps: int) -> list[list[str]]:
        return [[dataset.ids[i] for i in stream.next()] for _ in range(steps)]

    straight = ids(*opened(), 9)
    found: list[list[str]] = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        dataset, stream = opened()
        if state is not None:
            stream.load_state_dict(state)
        found += ids(dataset, stream, 3)
        state = json.loads(json.dumps(stream.state_dict()))
    assert found == straight and state is not None
    other = build(chat, tmp_path, sft_max_samples=39)
    with pytest.raises(DataError, match="num_samples was 40, is 39; dataset_fingerprint was"):
        MinibatchStream(len(other), 16, 3, other.fingerprint).load_state_dict(state)


def test_tokenizer_of_the_keys(tmp_path: Path) -> None:
    assert build_tokenizer({"sft_dataset_name": "stdlib", "tokenizer_type": "byte"}).vocab_size == 259
    with pytest.raises(DataError, match="absent"):
        build_tokenizer(
            {"sft_dataset_name": "stdlib", "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "absent")},
        )


def test_the_data_part_imports_no_torch() -> None:
    code = "import sys, primus_odc.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
