"""``primus-odc compare``: options, refusals, files written, and what the machine's facts leave out."""

from __future__ import annotations

import argparse
import getpass
import json
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from primus_odc._locks import FOLDER_LOCK
from primus_odc.errors import ConfigError, DataError
from primus_odc.report.command import add_compare_arguments, run_compare
from primus_odc.report.machine import describe_command, describe_machine, describe_versions
from primus_odc.report.result import ComparisonResult
from tests.report.report_records import make_comparison
from tests.report.test_logs import HEADER, step, write


def parse(words: Sequence[str], overrides: Sequence[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_compare_arguments(parser)
    args = parser.parse_args(words)
    args.overrides = list(overrides)
    return args


def test_from_logs_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write(tmp_path / name, HEADER, [step(i) for i in range(4)])) for name in "ab"]
    assert run_compare(parse(["--from-logs", *runs, "--output", str(tmp_path / "out")])) == 0
    assert ComparisonResult.read(tmp_path / "out" / "result.json").baseline == "nccl_pad (A)"
    assert "<svg" in (tmp_path / "out" / "index.html").read_text()
    assert "nccl_pad (B)" in capsys.readouterr().out


def play_arms(monkeypatch: pytest.MonkeyPatch, run_job: Callable[..., None]) -> None:
    module = ModuleType("primus_odc.megatron.compare")
    module.run_job = run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "primus_odc.megatron.compare", module)


def test_arms_are_run_by_the_other_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run_job(config: Path, *, result: Path, **options: Any) -> None:
        calls.append((config, options))
        make_comparison(steps=4, ranks=2).write(result)

    play_arms(monkeypatch, run_job)
    args = parse(["x.yaml", "--arms", "nccl_pad,odc_nopad", "--steps", "3", "--nproc", "2", "--output", str(tmp_path)], ["--lr", "1"])
    assert run_compare(args) == 0
    ((config, options),) = calls
    assert config == Path("x.yaml")
    assert {key: options[key] for key in ("overrides", "arms", "steps", "nproc")} == {
        "overrides": ["--lr", "1"],
        "arms": ("nccl_pad", "odc_nopad"),
        "steps": 3,
        "nproc": 2,
    }
    assert json.loads((tmp_path / "result.json").read_text())["format"] == 2


def test_two_at_once_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write(tmp_path / name, HEADER, [step(i) for i in range(4)])) for name in "ab"]
    out, busy = tmp_path / "out", r"--output: a run that is still going on writes into .*out; choose another folder with --output"
    from_logs, arms = ["--from-logs", *runs, "--output", str(out)], ["x.yaml", "--output", str(out)]

    def second(config: Path, *, before_start: Callable[[], object], **options: Any) -> None:
        before_start()
        raise AssertionError("ranks were started")

    def first(config: Path, *, result: Path, before_start: Callable[[], object], **options: Any) -> None:
        assert not out.exists()  # a comparison that is refused leaves none
        before_start()
        for words in (from_logs, arms):
            play_arms(monkeypatch, second)
            with pytest.raises(DataError, match=busy):
                run_compare(parse(words))
        assert [path.name for path in out.iterdir()] == [FOLDER_LOCK]
        make_comparison(steps=4, ranks=2).write(result)

    play_arms(monkeypatch, first)
    assert run_compare(parse(arms)) == 0
    assert run_compare(parse(from_logs)) == 0  # it is over


def test_all_wrong_options_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        run_compare(parse(["--arms", "nccl_pad,odc,odc", "--steps", "0", "--nproc", "0"]))
    assert len(refusal.value.problems) == 6
    with pytest.raises(ConfigError) as refusal:
        run_compare(parse(["x.yaml", "--from-logs", "a", "b", "--steps", "3"], ["--lr", "1"]))
    assert len(refusal.value.problems) == 3


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = write(tmp_path / "a", HEADER, [step(i) for i in range(4)])
    (tmp_path / "link").symlink_to(run)
    for other in (run, run / "steps.jsonl", tmp_path / "link", run / ".." / "a"):
        with pytest.raises(ConfigError, match=r"--from-logs: .*a and .* are the same run; give the folders of two"):
            run_compare(parse(["--from-logs", str(run), str(other), "--output", str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arm", "meant"), [("odc_no_pad", "odc_nopad"), ("zero2", "nccl_zero2"), ("nccl", "nccl_pad")])
def test_misspelt_arms(arm: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"--arms: '{arm}' is not known, did you mean '{meant}'"):
        run_compare(parse(["x.yaml", "--arms", f"odc_pad,{arm}"]))


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ("odc_nopad", ["odc_nopad alone leaves nothing to compare; name at least two, separated by commas, as nccl_pad,odc_nopad"]),
        ("nccl_pad", ["nccl_pad alone leaves nothing to compare; name at least two, separated by commas, as nccl_pad,odc_nopad"]),
        ("odc_pad,odc_pad", ["odc_pad stands there 2 times; name each once", "odc_pad alone leaves nothing to compare"]),
        ("odc_pad,nccl_pad,odc_pad", ["odc_pad stands there 2 times; name each once"]),
        ("best", ["'best' is not known"]),
        ("", ["'' is not known"]),
    ],
)
def test_arms_that_leave_nothing_to_compare(arms: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    play_arms(monkeypatch, lambda *_, **__: pytest.fail("the arms were run"))
    with pytest.raises(ConfigError) as refusal:
        run_compare(parse(["x.yaml", "--arms", arms]))
    assert len(refusal.value.problems) == len(said)
    assert all(problem.startswith(f"--arms: {start}") for problem, start in zip(refusal.value.problems, said, strict=True))


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder that can be written to"):
        run_compare(parse(["x.yaml", "--output", str(tmp_path / "file" / "below")]))


def test_machine_facts_name_nobody() -> None:
    facts = json.dumps([describe_machine(), describe_versions()])
    assert socket.gethostname() not in facts
    assert str(Path.home()) not in facts or str(Path.home()) == "/"
    assert "/" not in facts.replace(str(describe_machine()["cpu"]), "")
    assert len(getpass.getuser()) < 3 or f'"{getpass.getuser()}"' not in facts
    assert {"cpu", "cores", "memory_gib", "system"} <= set(describe_machine())
    assert {"python", "numpy", "primus_odc"} <= set(describe_versions())


def test_command_line_without_paths() -> None:
    told = describe_command(["/somewhere/cli.py", "compare", "/data/me/quick.yaml", "--steps", "3", "configs/a.yaml"])
    assert told == "primus-odc compare quick.yaml --steps 3 configs/a.yaml"
