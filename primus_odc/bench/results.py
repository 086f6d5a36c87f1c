"""The JSON of benchmarks: one file that grows over many short runs.

::

    {"format": 1, "runs": [{"commit": ..., "machine": {...}, "versions": {...}, "entries": [ENTRY, ...]}, ...]}

A run is what one commit measured on one kind of machine; a call of ``primus-odc bench`` adds its entries to it. The file holds what was
measured step by step, nothing derived: statistics are made when it is read, so that a table can be made again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from primus_odc.errors import DataError
from primus_odc.report.machine import describe_machine, describe_versions, utc_now

FORMAT = 1


def load(path: Path) -> dict[str, Any]:
    """The file's content; an empty collection where there is no file.

    Raises:
        DataError: it is not such a file.
    """
    if not path.exists():
        return {"format": FORMAT, "runs": []}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; move it away or choose another --out") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("runs"), list):
        raise DataError(f"{path} is not a benchmark file of format {FORMAT}; move it away or choose another --out")
    return content


def identity(commit: str | None) -> dict[str, Any]:
    """Commit, machine and versions: what decides whether measurements belong into one table. ``commit``: instead of what git says. Among
    the versions is the digest of the package's sources, so that copies of which git cannot tell the commit are told apart."""
    versions = describe_versions()
    found = versions.pop("commit")
    return {"commit": commit or found, "machine": describe_machine(), "versions": versions}


def append(path: Path, run: dict[str, Any], entry: dict[str, Any]) -> None:
    """Add ``entry`` to the run ``run`` (from :func:`identity`), which is started where the file has no such run yet.

    A call that is ended in between leaves the old file.
    """
    content = load(path)
    merge(content, {"runs": [{**run, "entries": [{"time": utc_now(), **entry}]}]})
    save(path, content)


def merge(content: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the runs of ``other`` to ``content``: entries it has already, as they are, are not added twice."""
    for run in other["runs"]:
        key = {name: value for name, value in run.items() if name != "entries"}
        same = next((known for known in content["runs"] if all(known.get(name) == value for name, value in key.items())), None)
        if same is None:
            same = {**key, "entries": []}
            content["runs"].append(same)
        same["entries"] += [entry for entry in run["entries"] if entry not in same["entries"]]


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
