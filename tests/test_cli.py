"""The command line: dispatch, overrides, errors and exit codes, with stand-ins for the parts that do the work."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from types import ModuleType

import pytest

from primus_odc import __version__
from primus_odc.cli import COMMANDS, main
from primus_odc.errors import ConfigError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Replaces every part by one that takes a config and notes its arguments; the config ``broken`` raises."""
    seen: list[argparse.Namespace] = []

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config")
        parser.add_argument("--steps", type=int, default=1)

    def run(args: argparse.Namespace) -> int | None:
        seen.append(args)
        if args.config == "broken":
            raise ConfigError(["comm_backend: odc_nopd is not known"])
        return 3 if args.config == "unequal" else None

    for command in COMMANDS:
        part = ModuleType(command.module)
        setattr(part, f"add_{command.name}_arguments", add)
        setattr(part, f"run_{command.name}", run)
        monkeypatch.setitem(sys.modules, command.module, part)
    return seen


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["train"], ["--check"]),
        (["compare"], ["--steps", "5"]),
        (["plan"], ["--json"]),
        (["doctor"], ["--ranks", "2"]),
        (["bench", "curves"], ["--out", "c.json"]),
    ],
)
def test_words_that_a_command_with_a_yaml_does_not_know_are_overrides(
    words: list[str], own: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the parts' own parsers."""
    seen: list[argparse.Namespace] = []
    part = importlib.import_module(next(command.module for command in COMMANDS if command.name == words[0]))
    monkeypatch.setattr(part, f"run_{words[0]}", seen.append)
    assert main([*words, "exp.yaml", "--lr", "1e-4", *own, "odc.timeout_s=60", "--swiglu", "--step=7", "--min_lr", "-1"]) == 0
    (args,) = seen
    assert str(args.lengths if words == ["plan"] else args.config) == "exp.yaml"
    assert args.overrides == ["--lr", "1e-4", "odc.timeout_s=60", "--swiglu", "--step=7", "--min_lr", "-1"]
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert "Words after the YAML change its keys: --key value, key=value, block.key=value." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    [
        ["traffic", "--shape", "14B", "--nodes", "2"],
        ["bench", "train", "--points", "1", "--out", "r.json"],
        ["bench", "report", "r.json"],
    ],
)
def test_a_command_without_a_yaml_takes_no_overrides(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--node", "4"])
    assert caught.value.code == 2
    name = " ".join(words[: 2 if words[0] == "bench" else 1])
    assert f"{name} does not know: --node 4" in capsys.readouterr().err


def test_exit_code_of_the_command(calls: list[argparse.Namespace]) -> None:
    assert main(["train", "unequal"]) == 3
    assert main(["train", "exp.yaml"]) == 0


def test_error_is_one_message(calls: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "broken"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "primus-odc: error: 1 problem in the configuration:\n  - comm_backend: odc_nopd is not known\n"


@pytest.mark.parametrize("words", [["--traceback", "train", "broken"], ["train", "broken", "--traceback"]])
def test_traceback(calls: list[argparse.Namespace], words: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(words)
    assert calls[0].overrides == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"primus-odc {__version__}\n"


@pytest.mark.parametrize("words", [[], ["trian"]])
def test_no_such_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: primus-odc" in capsys.readouterr().err


def test_help_imports_no_part() -> None:
    code = "import sys, primus_odc.cli\ntry: primus_odc.cli.main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    for command in COMMANDS:
        assert command.summary in done.stdout
