"""Datasets in the layouts of Hugging Face: a folder on this machine, or a name of the hub.

A folder is one of

* the result of ``save_to_disk`` (needs the package ``datasets``),
* parquet files at any depth, as a snapshot of a dataset repository has them (needs ``pyarrow``),
* JSONL files at any depth (needs nothing).

Where file names begin with a split's name (``train-00000-of-00004.parquet``, ``validation.jsonl``), only those of the wanted split are
read; either all names do or none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from primus_odc.data.optional import optional_import
from primus_odc.data.records import Form
from primus_odc.data.sources import JsonlSource, ParquetSource, RowSource, Source
from primus_odc.errors import DataError

_NAMED_SPLIT = re.compile(r"(train|validation|valid|dev|test|[a-z_]+(?=-\d{5}-of-\d{5}))(?![a-z])", re.IGNORECASE)


def folder_source(folder: Path, split: str, form: Form) -> Source:
    """The source for a folder.

    Args:
        folder: an existing folder.
        split: name of the split wanted, ``train`` for instance.
        form: how rows are read, see :func:`primus_odc.data.records.parse_record`.

    Raises:
        DataError: nothing readable there, no such split, or a package is missing.
    """
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        library = optional_import("datasets", "datasets", f"the dataset folder {folder}")
        return RowSource(f"{folder.name}[{split}]", _pick(library.load_from_disk(str(folder)), split, str(folder)), form)
    for suffix, reader in ((".parquet", ParquetSource), (".jsonl", JsonlSource)):
        files = sorted(file for file in folder.rglob(f"*{suffix}") if file.is_file())
        if files:
            return reader(_of_split(files, split, folder), folder, form)
    raise DataError(f"{folder}: neither a folder written by save_to_disk, nor any .parquet or .jsonl file below it")


def hub_source(name: str, split: str, form: Form) -> Source:
    """The source for a dataset of the hub, through ``datasets.load_dataset``.

    Untested: the project's tests run without a network.

    Raises:
        DataError: the package is missing.
    """
    return RowSource(f"{name}[{split}]", import_datasets(name).load_dataset(name, split=split), form)


def import_datasets(name: str) -> Any:
    """The package ``datasets``, which a dataset ``name`` of the hub needs.

    Raises:
        DataError: the package is missing.
    """
    return optional_import("datasets", "datasets", f"sft_dataset_name {name!r} (no path here, so a name of the hub)")


def _pick(loaded: Any, split: str, folder: str) -> Any:
    """One split of a DatasetDict; a plain Dataset has no splits to choose from and is taken whole."""
    if not hasattr(loaded, "keys"):
        return loaded
    if split not in loaded:
        raise DataError(f"{folder} has no split {split!r}; set sft_dataset_split to one of {', '.join(sorted(loaded.keys()))}")
    return loaded[split]


def _of_split(files: list[Path], split: str, folder: Path) -> list[Path]:
    named = {file: match.group(1).lower() for file in files if (match := _NAMED_SPLIT.match(file.stem))}
    if not named:
        return files
    if len(named) < len(files):
        other = next(file for file in files if file not in named)
        raise DataError(f"{folder}: some file names begin with a split, {other.name!r} does not; move it away, or rename it")
    chosen = [file for file, name in named.items() if name == split.lower()]
    if not chosen:
        raise DataError(
            f"{folder} has no file of the split {split!r}; set sft_dataset_split to one of {', '.join(sorted(set(named.values())))}"
        )
    return chosen
