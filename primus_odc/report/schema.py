"""Dataclasses to JSON and back, with errors that name the place.

The annotations of a record *are* its schema: :func:`decode` walks them beside the JSON value. It accepts exactly what :func:`encode`
writes, refuses unknown keys (a misspelt optional key would otherwise vanish) and numbers that JSON has no word for (NaN, infinity), and
reports a path such as ``arms[1].ms_per_step[3]``. Supported: ``float``, ``int``, ``str``, ``bool``, ``object`` (any JSON value),
``list[T]``, ``dict[str, T]``, ``T | None``, ``Literal[...]`` and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from primus_odc.errors import DataError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """The JSON value of a record, a list, a dict or a plain value; dataclass fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: encode(item) for name, item in pairs if item is not None}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], value: Any, path: str = "") -> T:
    """``value`` as an instance of ``kind``.

    Raises:
        DataError: the value does not fit; the message starts with its path.
    """
    return typing.cast(T, _decode(kind, value, path))


def _decode(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is object:
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        assert len(inner) == 1, f"only T | None is supported, not {kind}"
        return None if value is None else _decode(inner[0], value, path)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise _error(path, f"{value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _error(path, f"expected a list, got {_name(value)}")
        (item,) = typing.get_args(kind)
        return [_decode(item, element, f"{path}[{index}]") for index, element in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _error(path, f"expected an object, got {_name(value)}")
        _, item = typing.get_args(kind)
        return {key: _decode(item, element, _join(path, key)) for key, element in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, path)
    return _decode_plain(kind, value, path)


def _decode_plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _error(path, f"expected a number, got {_name(value)}")
        if not math.isfinite(value):
            raise _error(path, f"expected a finite number, got {value}")
        return float(value)
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise _error(path, f"expected a whole number, got {_name(value)}")
    if kind is str and not isinstance(value, str):
        raise _error(path, f"expected a string, got {_name(value)}")
    if kind is bool and not isinstance(value, bool):
        raise _error(path, f"expected true or false, got {_name(value)}")
    assert kind in (int, str, bool), f"unsupported annotation {kind} at {path}"
    return value


def _decode_record(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _error(path, f"expected an object, got {_name(value)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise _error(_join(path, key), "unknown key" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(fields)}"))
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _error(_join(path, name), "missing")
    try:
        return kind(**arguments)
    except DataError as error:
        raise _error(path, str(error)) from None


def write_json(path: Path, value: Any) -> None:
    """Writes the record as indented JSON, replacing the file in one step.

    Raises:
        DataError: the record holds NaN or infinity.
    """
    try:
        text = json.dumps(encode(value), indent=1, allow_nan=False)
    except ValueError as error:
        raise DataError(f"{path.name}: not written, {error}; a loss or a time in the record is not finite") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """The parsed file.

    Raises:
        DataError: there is no such file, or it is not JSON; the message gives line and column.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _error(path: str, what: str) -> DataError:
    return DataError(f"{path}: {what}" if path else what)


def _name(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
