"""A Primus experiment YAML as the standalone trainer reads it.

The file holds ``work_group``, ``user_name``, ``exp_name``, ``workspace`` and under ``modules`` one trainer, whose name contains "trainer"::

    work_group: odc
    user_name: me
    exp_name: quickstart
    workspace: output
    modules:
      post_trainer:
        framework: megatron
        num_layers: 6
        comm_backend: odc_nopad

A module like this one is self-contained: its parameters stand flat beside ``framework``. A module that names Primus presets (``config``
and ``model``) needs them, so it is resolved by Primus' own loader, imported at run time from ``PRIMUS_PATH``. Both ways give the
parameters that Primus' loader gives; command-line overrides go on top. The four keys above, which say where output goes, may be overridden
too (``--exp_name second``), which Primus itself does not do.

Primus v26.5 loads a self-contained module, but its runtime then looks it up under another name than its parser gave it and stops with
"Missing required module". A launch through that Primus needs a YAML with presets.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from primus_odc._config_values import BadValueError, describe, expand_home
from primus_odc._experiment_yaml import load_block, merge, parse_overrides, read_yaml
from primus_odc.errors import ConfigError

_REQUIRED = ("work_group", "user_name", "exp_name", "workspace")
# Keys of a module that are no parameters of the trainer.
_RESERVED = ("name", "framework", "config", "model", "params", "trainer_class")


@dataclass(kw_only=True, slots=True, frozen=True)
class Experiment:
    """One resolved experiment."""

    name: str
    """``exp_name``."""

    workspace: Path
    """``workspace``, below which all output goes; a relative one counts from the working directory."""

    root: Path
    """The folder of this experiment: workspace/work_group/user_name/exp_name, where Primus writes too."""

    module_name: str
    """Name of the trainer module, ``pre_trainer`` or ``post_trainer`` for Primus."""

    framework: str
    """``framework`` of the trainer module."""

    params: dict[str, Any]
    """Parameters of the trainer module as plain dicts, lists and scalars: presets, file, overrides, the later the stronger."""

    env: dict[str, str]
    """The ``env`` block of the file itself (not of what it extends), which Primus puts into the environment before it imports torch."""

    source: Path
    """The file that was read."""

    self_contained: bool = True
    """Whether the module names no preset of Primus, so that every key in it is meant for this trainer."""


def load_experiment(path: str | Path, overrides: Sequence[str] = (), *, primus_path: str | Path | None = None) -> Experiment:
    """Read an experiment YAML.

    Args:
        path: the file.
        overrides: command-line words that change module parameters (``--lr 1e-4``, ``comm_backend=odc_pad``, ``odc.timeout_s=60``) and
            the keys of the file itself that say where output goes (``--exp_name second``).
        primus_path: a Primus checkout for modules that name presets; unset: the environment variable PRIMUS_PATH.

    Raises:
        ConfigError: the file, a file it extends or an override is wrong, or presets are named and no Primus is at hand.
    """
    source = Path(path)
    changes = parse_overrides(overrides)
    content = read_yaml(source)
    content |= {key: changes.pop(key) for key in _REQUIRED if key in changes}
    problems = [f"{source}: {key} is missing" for key in _REQUIRED if content.get(key) is None]
    modules: Any = content.get("modules")
    problems += [
        f"{key} must be a name, but {describe(content[key])} was given"
        for key in _REQUIRED
        if isinstance(content.get(key), dict | list | bool)
    ]
    problems += [
        f"{key} is {describe(content[key])}; it names one folder, so it cannot be empty, . or .., hold a / or end with .jsonl"
        for key in _REQUIRED
        if key != "workspace" and isinstance(content.get(key), str) and not _names_a_folder(content[key])
    ]
    if isinstance(content.get("workspace"), str) and (not content["workspace"] or "\0" in content["workspace"]):
        problems.append(f"workspace is {describe(content['workspace'])}; it must be the path of a folder")
    workspace = Path()
    try:
        workspace = expand_home(str(content.get("workspace")))
    except BadValueError as error:
        problems.append(f"{source}: workspace {error}")
    problems += _check_modules(source, modules)
    if problems:
        raise ConfigError(problems)
    ((module_name, module),) = modules.items()
    self_contained = "config" not in module and "model" not in module
    if not self_contained:
        params = _resolve_presets(source, module_name, primus_path or os.environ.get("PRIMUS_PATH"))
    else:
        params = merge(_block(module.get("params")), {key: value for key, value in module.items() if key not in _RESERVED})
    return Experiment(
        name=str(content["exp_name"]),
        workspace=workspace,
        root=workspace.joinpath(*(str(content[key]) for key in ("work_group", "user_name", "exp_name"))),
        module_name=module_name,
        framework=str(module["framework"]),
        params=merge(params, changes),
        env=env_block(source),
        source=source,
        self_contained=self_contained,
    )


def env_block(source: Path) -> dict[str, str]:
    """The ``env`` block of the file itself (not of what it extends), with variables expanded.

    Raises:
        ConfigError: the file cannot be read, its ``env`` is no block, or it holds what cannot be a variable here.
    """
    env = _block(load_block(source).get("env"))
    if not isinstance(env, dict):
        raise ConfigError([f"{source}: env must be a block of names and values, but is {describe(env)}"])
    block = {str(key): os.path.expandvars(str(value)) for key, value in env.items()}
    if problems := [f"{source}: env.{key}: {reason}" for key, value in block.items() if (reason := _no_variable(key, value))]:
        raise ConfigError(problems)
    return block


def _no_variable(key: str, value: str) -> str | None:
    """Why the system would not take this variable; None where it would."""
    if not key or "=" in key or "\0" in key + value:
        return "a variable has a name without '=', and neither name nor value holds a zero byte"
    try:
        os.fsencode(key + value)
    except UnicodeEncodeError as error:
        return (
            f"this locale's encoding ({error.encoding}) has no {error.object[error.start : error.end]!a}; use one of UTF-8 (LC_ALL=C.UTF-8)"
        )
    return None


def _block(value: Any) -> Any:
    """An absent block is an empty one; whatever else stands in its place (``0``, ``false``, an empty text) is for the reader to refuse."""
    return {} if value is None else value


def _names_a_folder(name: str) -> bool:
    """Whether output below it stays below it; a path that ends with .jsonl would be taken for a step log itself."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and not name.endswith(".jsonl")


def _check_modules(source: Path, modules: Any) -> list[str]:
    if not isinstance(modules, dict) or len(modules) != 1:
        names = ", ".join(map(str, modules)) if isinstance(modules, dict) else "none" if modules is None else describe(modules)
        return [f"{source}: modules must hold exactly one trainer module, but holds {names or 'none'}"]
    ((name, module),) = modules.items()
    problems: list[str] = []
    if "trainer" not in str(name):
        problems.append(f"{source}: modules.{name} is no trainer; its name must contain 'trainer', as pre_trainer or post_trainer")
    if not isinstance(module, dict):
        return [*problems, f"{source}: modules.{name} must be a block of keys, but is {module!r}"]
    framework = module.get("framework")
    if framework is None:
        problems.append(f"{source}: modules.{name}.framework is missing")
    elif not isinstance(framework, str) or not framework:
        problems.append(f"{source}: modules.{name}.framework must be a name, as megatron, but is {describe(framework)}")
    if not isinstance(_block(module.get("params")), dict):
        problems.append(f"{source}: modules.{name}.params must be a block of keys, but is {describe(module['params'])}")
    if "overrides" in module and "config" not in module and "model" not in module:
        problems.append(
            f"{source}: modules.{name}.overrides applies to presets (config, model), of which there are none; "
            "write its keys beside framework"
        )
    return problems


def _resolve_presets(source: Path, module_name: str, primus_path: str | Path | None) -> dict[str, Any]:
    """Parameters of a module that names presets, from Primus' own loader."""
    if not primus_path:
        raise ConfigError(
            [
                f"{source}: modules.{module_name} names a Primus preset (config, model), which only Primus can resolve; "
                "primus-odc reads self-contained YAMLs (all keys beside framework). Let Primus itself run this one; or, to train it with "
                "primus-odc, set PRIMUS_PATH to a Primus checkout and start `torchrun -m primus_odc train`"
            ]
        )
    loader = _import_primus_loader(Path(primus_path).resolve())
    try:
        loaded = loader.load_primus_config(source)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise ConfigError([f"{source}: Primus at {primus_path} cannot resolve modules.{module_name}: {error}"]) from error
    return _plain(vars(loader.get_module_config(loaded, module_name).params))


def _import_primus_loader(checkout: Path) -> ModuleType:
    """Primus' configuration loader from ``checkout`` and from nowhere else."""
    if not (checkout / "primus" / "core" / "config" / "primus_config.py").is_file():
        raise ConfigError([f"PRIMUS_PATH={checkout} is no Primus checkout: it holds no primus/core/config/primus_config.py"])
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    loader = importlib.import_module("primus.core.config.primus_config")
    if checkout not in Path(str(loader.__file__)).resolve().parents:
        raise ConfigError([f"primus was already imported from {loader.__file__}, not from PRIMUS_PATH={checkout}; use one of the two"])
    return loader


def _plain(value: Any) -> Any:
    """Namespaces, as Primus makes of blocks, turned into dicts again."""
    if isinstance(value, SimpleNamespace):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
