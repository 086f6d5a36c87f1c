"""Reading experiment YAML files: ``${VAR}`` expansion, ``extends`` and command-line overrides, with the meaning Primus gives them.

``${VAR}`` must be set, ``${VAR:default}`` need not be. A text that changed by expansion and now spells true, false or a number becomes
one; a text without a variable stays text. ``extends`` names one file or a list, relative to the file that names them or absolute; later
ones override earlier ones, the file itself overrides all; blocks merge, everything else is replaced.

Stricter than Primus in three points, each of which would otherwise train on something else than what was written: a key given twice in
one block, files that extend each other in a circle, and command-line words that are no override are errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from primus_odc._config_values import describe
from primus_odc.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(?P<name>[^:{}]+)(?::(?P<default>[^}]*))?\}")
# Longer ones stay text, which no key of a number accepts.
_INTEGER = re.compile(r"-?\d{1,400}")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
_KEY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice in one block is an error instead of silently replacing the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                if key_node.value in seen:
                    first = f"{key_node.start_mark.name}: {key_node.value} is given twice"
                    raise ConfigError([f"{first}, in lines {seen[key_node.value]} and {line}"])
                seen[key_node.value] = line
        return node


def read_yaml(path: Path, _extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of ``path`` with variables expanded and ``extends`` merged.

    Raises:
        ConfigError: the file or one that it extends is missing, is no YAML block, or needs variables that are not set (all are named).
    """
    block = load_block(path, _extended_by)
    missing: list[str] = []
    try:
        block = _expand(block, missing)
    except RecursionError:
        raise ConfigError([f"{path} holds an alias (*name) of a block or list inside that block or list itself"]) from None
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        raise ConfigError([f"{path} needs environment variables that are not set: {names}; set them, or write ${{NAME:default}}"])
    extends = block.pop("extends", None)
    merged: dict[str, Any] = {}
    for name in extends if isinstance(extends, list) else [extends] if extends is not None else []:
        if not isinstance(name, str) or not name:
            raise ConfigError([f"{path}: extends must name a file or a list of files, but holds {describe(name)}"])
        base = path.parent / name
        chain = (*_extended_by, path)
        if base.resolve() in (file.resolve() for file in chain):
            raise ConfigError([f"{path} extends {name}, which extends it in turn: {' -> '.join(str(file) for file in (*chain, base))}"])
        merged = merge(merged, read_yaml(base, chain))
    return merge(merged, block)


def load_block(path: Path, extended_by: Sequence[Path] = ()) -> dict[str, Any]:
    """The content of the one file ``path`` as it is written."""
    try:
        block = yaml.load(path.read_text(encoding="utf-8"), Loader=_named_loader(path))
    except OSError as error:
        by = f", which {extended_by[-1]} extends" if extended_by else ""
        raise ConfigError([f"cannot read {path}{by}: {error.strerror}"]) from error
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply to be read"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{path} is not YAML: {error}"]) from error
    if not isinstance(block, dict):
        raise ConfigError([f"{path} must be a block of keys, but is {'empty' if block is None else type(block).__name__}"])
    return block


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``: blocks merge key by key, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Command-line words as a nested block: ``--key value``, ``--key=value``, ``key=value``, ``a.b=value``, and ``--flag`` for true.

    Values are typed as in a YAML file, except that ``None`` is null and that ``1e-4``, text for YAML, is a number.

    Raises:
        ConfigError: naming every word that is no override.
    """
    problems: list[str] = []
    result: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        key, equals, text = word.partition("=")
        if not equals:
            if not word.startswith("--"):
                problems.append(f"{word!r} is no override; write --key value, key=value or block.key=value")
                continue
            text = "true"
            if position < len(words) and not words[position].startswith("--"):
                text = words[position]
                position += 1
                if _KEY.fullmatch(text.partition("=")[0]) and "=" in text:
                    problems.append(f"{word} {text} can be read in two ways; write {word}=true {text}, or {word}={text}")
                    continue
        key = key.removeprefix("--")
        if not _KEY.fullmatch(key):
            hint = f"; keys are written with underscores: {key.replace('-', '_')}" if _KEY.fullmatch(key.replace("-", "_")) else ""
            problems.append(f"{word!r} names no key{hint}")
            continue
        try:
            value = _typed(text)
        except RecursionError:
            problems.append(f"the value of {key} is nested too deeply to be read")
            continue
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"the value of {key}, {text!r}, is not YAML: {' '.join(str(error).split())}")
            continue
        block: dict[str, Any] = {}
        innermost = block
        *outer, last = key.split(".")
        for name in outer:
            innermost = innermost.setdefault(name, {})
        innermost[last] = value
        result = merge(result, block)
    if problems:
        raise ConfigError(problems)
    return result


def _named_loader(path: Path) -> Any:
    """The loader for one file; parse errors and duplicates name it."""

    def make(stream: str) -> _UniqueKeyLoader:
        loader = _UniqueKeyLoader(stream)
        loader.name = str(path)
        return loader

    return make


def _expand(value: Any, missing: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, missing) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, missing) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        found = os.environ.get(name, default)
        if found is None:
            missing.append(name)
            return ""
        return found

    expanded = _VARIABLE.sub(replace, value)
    return value if expanded == value else _scalar(expanded)


def _scalar(text: str) -> str | bool | int | float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _typed(text: str) -> Any:
    if text == "None":
        return None
    value = yaml.safe_load(text)
    return _scalar(value) if isinstance(value, str) and value == text else value
