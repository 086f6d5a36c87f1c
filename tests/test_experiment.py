"""Experiment YAMLs: what is read, what is refused, and that Primus itself reads the same parameters (with PRIMUS_PATH)."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_odc.config import parse_odc
from primus_odc.errors import ConfigError
from primus_odc.experiment import Experiment, load_experiment

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

HEAD = "work_group: group\nuser_name: user\nexp_name: exp\nworkspace: out\n"
TRAINER = "modules:\n  post_trainer:\n    framework: megatron\n"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PRIMUS_TEAM", "PRIMUS_USER", "PRIMUS_EXP_NAME", "PRIMUS_WORKSPACE", "ODC_TEST_")):
            monkeypatch.delenv(name)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, module: str, *overrides: str) -> Experiment:
    return load_experiment(write(folder, "exp.yaml", HEAD + TRAINER + module), overrides)


def refusal(path: Path, *overrides: str, primus_path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides, primus_path=primus_path)
    return str(caught.value)


def test_self_contained_module(tmp_path: Path) -> None:
    text = (
        HEAD + "env: {A: 1}\n" + TRAINER + "    trainer_class: x\n    lr: 1.0e-4\n    odc: {timeout_s: 3}\n    params: {seed: 1, lr: 2}\n"
    )
    experiment = load_experiment(write(tmp_path, "exp.yaml", text))
    assert experiment.name == "exp"
    assert experiment.workspace == Path("out")
    assert experiment.root == Path("out/group/user/exp")
    assert experiment.module_name == "post_trainer"
    assert experiment.framework == "megatron"
    assert experiment.params == {"seed": 1, "lr": 1.0e-4, "odc": {"timeout_s": 3}}
    assert experiment.env == {"A": "1"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "1e-4"], {"lr": 1e-4}),
        (["--lr=1.5"], {"lr": 1.5}),
        (["lr=2"], {"lr": 2}),
        (["--lr", "-2"], {"lr": -2}),
        (["--odc.timeout_s", "60"], {"odc": {"timeout_s": 60}}),
        (["odc.timeout_s=60", "odc.transport=host"], {"odc": {"timeout_s": 60, "transport": "host"}}),
        (["--swiglu", "--bf16", "false"], {"swiglu": True, "bf16": False}),
        (["--swiglu"], {"swiglu": True}),
        (["save=null", "load=None"], {"save": None, "load": None}),
        (["odc.cost_model=[1.5, 2]"], {"odc": {"cost_model": [1.5, 2]}}),
        (["name='5'", "path=a=b"], {"name": "5", "path": "a=b"}),
        (["lr=1", "lr=2"], {"lr": 2}),
    ],
)
def test_overrides(tmp_path: Path, words: list[str], expected: dict[str, Any]) -> None:
    assert load(tmp_path, "", *words).params == expected


def test_overrides_go_on_top_of_the_file(tmp_path: Path) -> None:
    params = load(tmp_path, "    lr: 1\n    odc: {timeout_s: 3, verify: checksum}\n", "--odc.timeout_s", "60").params
    assert params == {"lr": 1, "odc": {"timeout_s": 60, "verify": "checksum"}}


def test_where_output_goes_can_be_overridden(tmp_path: Path) -> None:
    experiment = load(tmp_path, "    lr: 1\n", "--exp_name", "second", "workspace=elsewhere", "user_name=5", "--lr", "2")
    assert experiment.name == "second"
    assert experiment.root == Path("elsewhere/group/5/second")
    assert experiment.params == {"lr": 2}
    path = write(tmp_path, "exp.yaml", HEAD + TRAINER)
    assert "exp_name must be a name, but the block {'x': 1} was given" in refusal(path, "exp_name.x=1")
    assert "exp_name is missing" in refusal(path, "exp_name=null")


def test_self_contained_or_not(tmp_path: Path) -> None:
    assert load(tmp_path, "    lr: 1\n").self_contained


def test_wrong_overrides_are_all_named(tmp_path: Path) -> None:
    message = refusal(
        write(tmp_path, "exp.yaml", HEAD + TRAINER),
        "stray",
        "--train-iters=3",
        "a=[1",
        "=3",
        "--swiglu",
        "odc.timeout_s=3",
        "b=" + "[" * 3000,
        "c=" + "1" * 5000,
    )
    assert "7 problems" in message
    assert "the value of b is nested too deeply" in message
    assert "the value of c, " in message
    assert "'stray' is no override" in message
    assert "train_iters" in message
    assert "'[1', is not YAML" in message
    assert "'=3' names no key" in message
    assert "--swiglu=true odc.timeout_s=3" in message


def test_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_TEST_SET", "1e-3")
    params = load(
        tmp_path,
        "    a: ${ODC_TEST_SET}\n    b: ${ODC_TEST_UNSET:7}\n    c: x${ODC_TEST_SET:}y\n    d: ${ODC_TEST_UNSET:False}\n"
        '    e: \'12\'\n    f: 1e-3\n    g: ["${ODC_TEST_UNSET:.5}", {h: "${ODC_TEST_UNSET:}"}]\n',
    ).params
    assert params == {"a": 1e-3, "b": 7, "c": "x1e-3y", "d": False, "e": "12", "f": "1e-3", "g": [0.5, {"h": ""}]}


def test_missing_variables_are_all_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "exp.yaml", HEAD + TRAINER + "    a: ${ODC_TEST_A}\n    b: ${ODC_TEST_B}\n"))
    assert "ODC_TEST_A, ODC_TEST_B" in message


def test_extends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "base/one.yaml", HEAD + "extends: ../zero.yaml\n" + TRAINER + "    a: 1\n    b: 1\n    odc: {timeout_s: 1}\n")
    write(tmp_path, "zero.yaml", TRAINER + "    a: 0\n    z: 0\n")
    write(tmp_path, "base/two.yaml", TRAINER + "    b: 2\n    c: 2\n    d: [1, 2]\n")
    monkeypatch.setenv("ODC_TEST_BASE", str(tmp_path / "base"))
    top = "extends: [base/one.yaml, '${ODC_TEST_BASE}/two.yaml']\n" + TRAINER + "    c: 3\n    d: [3]\n    odc: {verify: checksum}\n"
    params = load_experiment(write(tmp_path, "top.yaml", top)).params
    assert params == {"a": 1, "z": 0, "b": 2, "c": 3, "d": [3], "odc": {"timeout_s": 1, "verify": "checksum"}}


def test_a_workspace_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path, "exp.yaml", HEAD.replace("workspace: ", "workspace: ~/") + TRAINER)
    assert load_experiment(file).root == tmp_path / "out" / "group" / "user" / "exp"


def test_extends_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    assert "which extends it in turn" in refusal(write(tmp_path, "b.yaml", "extends: ./a.yaml\n"))


def test_extends_a_missing_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "exp.yaml", "extends: gone.yaml\n"))
    assert "gone.yaml" in message
    assert "exp.yaml extends" in message


# Values that stand for nothing in Python, and are no absent keys.
EMPTY = (("0", "the number 0"), ("false", "false"), ("''", "the text ''"), ("[]", "the list []"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD.replace("user_name", "username") + TRAINER, "user_name is missing"),
        (HEAD, "exactly one trainer module"),
        (HEAD + TRAINER + "  pre_trainer:\n    framework: megatron\n", "post_trainer, pre_trainer"),
        (HEAD + TRAINER.replace("post_trainer", "training"), "its name must contain 'trainer'"),
        (HEAD + TRAINER.replace("framework", "backend"), "framework is missing"),
        (HEAD + TRAINER + "    overrides: {lr: 1}\n", "write its keys beside framework"),
        (HEAD + "modules: {post_trainer: 3}", "must be a block of keys, but is 3"),
        (HEAD + TRAINER + "    lr: 1\n    seed: 1\n    lr: 2\n", "lr is given twice, in lines 8 and 10"),
        (HEAD + "env: [1]\n" + TRAINER, "env must be a block"),
        (HEAD + TRAINER + "    params: [1]\n", "modules.post_trainer.params must be a block of keys, but is the list [1]"),
        (HEAD + TRAINER + "    odc: &odc {inner: *odc}\n", "holds an alias (*name) of a block or list inside"),
        ("extends: 3\n" + HEAD + TRAINER, "extends must name a file or a list of files, but holds the number 3"),
        *(
            (f"extends: {value}\n" + HEAD + TRAINER, f"extends must name a file or a list of files, but holds {told}")
            for value, told in (
                ("0", "the number 0"),
                ("false", "false"),
                ("''", "the text ''"),
                ("['']", "the text ''"),
                ("[null]", "null"),
            )
        ),
        *((HEAD + f"modules: {value}\n", f"exactly one trainer module, but holds {told}") for value, told in EMPTY),
        *((HEAD + f"env: {value}\n" + TRAINER, f"env must be a block of names and values, but is {told}") for value, told in EMPTY),
        *((HEAD + TRAINER + f"    params: {value}\n", f"params must be a block of keys, but is {told}") for value, told in EMPTY),
        *(
            (HEAD + TRAINER.replace("framework: megatron", f"framework: {value}"), f"framework must be a name, as megatron, but is {told}")
            for value, told in EMPTY
        ),
        ("extends: {a.yaml: 1}\n" + HEAD + TRAINER, "extends must name a file or a list of files"),
        (HEAD.replace("workspace: ", "workspace: ~nobody-here/") + TRAINER, "there is no such home folder"),
        ("", "is empty"),
        ("a: [1", "is not YAML"),
        ("a: " + "[" * 3000 + "]" * 3000 + "\n", "is nested too deeply to be read"),
        ("a: " + "1" * 5000 + "\n", "is not YAML"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(write(tmp_path, "exp.yaml", text))
    assert said in message and message.count("in the configuration:") == 1
    assert "exp.yaml" in message


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/a", "../../a", "a\0", "steps.jsonl"])
def test_names_stay_below_the_workspace(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "exp.yaml", HEAD + TRAINER)
    for key in ("work_group", "user_name", "exp_name"):
        assert f"{key} is the text {name!r}; it names one folder" in refusal(path, f"--{key}={json.dumps(name)}")
    # A leading dot, a number and a space name a folder as well.
    assert load_experiment(path, ["--exp_name", ".a b", "--user_name", "3"]).root == Path("out/group/3/.a b")
    for workspace in ("", "a\0"):
        assert "workspace is the text" in refusal(path, f"--workspace={json.dumps(workspace)}")


def test_null_stands_for_an_absent_key(tmp_path: Path) -> None:
    nothing = "extends: null\nenv: null\n" + HEAD + TRAINER + "    params: null\n    lr: 1\n"
    experiment = load_experiment(write(tmp_path, "exp.yaml", nothing))
    assert (experiment.params, experiment.env) == ({"lr": 1}, {})
    assert load_experiment(write(tmp_path, "none.yaml", "extends: []\n" + HEAD + TRAINER)).params == {}


def test_missing_file(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "gone.yaml")


def test_preset_without_primus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIMUS_PATH", raising=False)
    path = write(tmp_path, "exp.yaml", HEAD + TRAINER + "    config: sft_trainer.yaml\n    model: qwen2.5_7B.yaml\n")
    message = refusal(path)
    assert "self-contained YAMLs" in message and "Let Primus itself run this one" in message
    assert "is no Primus checkout" in refusal(path, primus_path=tmp_path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs(name: str) -> None:
    experiment = load_experiment(CONFIGS / f"{name}.yaml")
    arm = parse_odc(experiment.params).arm
    assert arm == (name.split("_", 1)[1] if name.endswith("pad") else "stock")
    assert experiment.name == name


def primus_params(path: Path) -> Any:
    """The parameters Primus' own loader gives the trainer module of ``path``."""
    checkout = os.environ.get("PRIMUS_PATH")
    if not checkout:
        pytest.skip("PRIMUS_PATH is not set: it names the Primus checkout to compare with")
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    (module,) = importlib.import_module("primus.core.config.primus_config").load_primus_config(path).modules
    return plain(module.params)


def plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return {key: plain(item) for key, item in vars(value).items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", SHIPPED)
def test_primus_reads_the_same_from_shipped_configs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMUS_WORKSPACE", str(tmp_path))
    expected = primus_params(CONFIGS / f"{name}.yaml")
    assert load_experiment(CONFIGS / f"{name}.yaml").params == expected
    assert "stage" in expected


def test_primus_reads_the_same_from_variables_and_extends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_TEST_SET", "1e-3")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "base/one.yaml", HEAD + TRAINER + "    a: 1\n    b: {x: 1, y: [1, {z: 2}]}\n    params: {seed: 1, a: 5}\n")
    values = [
        "${ODC_TEST_SET}",
        "${ODC_TEST_UNSET:7}",
        "x${ODC_TEST_SET:}y",
        "${ODC_TEST_UNSET:False}",
        "${ODC_TEST_UNSET:}",
        "${ODC_TEST_UNSET:-.5}",
    ]
    values += [
        "${ODC_TEST_UNSET:1.}",
        "${ODC_TEST_UNSET:1E5}",
        "${ODC_TEST_UNSET:nan}",
        "'12'",
        "1e-3",
        "1.0e-3",
        "off",
        "null",
        "0x10",
        "[1, 2]",
    ]
    lines = "".join(f"    v{i}: {value}\n" for i, value in enumerate(values))
    path = write(tmp_path, "top.yaml", "extends:\n  - base/one.yaml\n" + TRAINER + "    b: {x: 2}\n    trainer_class: t\n" + lines)
    assert load_experiment(path).params == primus_params(path)


def test_presets_resolved_by_primus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = "    config: sft_trainer.yaml\n    model: qwen2.5_7B.yaml\n    overrides: {comm_backend: odc_nopad, odc: {timeout_s: 3}}\n"
    path = write(tmp_path, "exp.yaml", HEAD + TRAINER + module)
    expected = primus_params(path)
    experiment = load_experiment(path, ["--odc.verify", "checksum"])
    assert experiment.params == {**expected, "odc": {"timeout_s": 3, "verify": "checksum"}}
    assert parse_odc(experiment.params).arm == "odc_nopad"
