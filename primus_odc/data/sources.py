"""Where records come from: JSONL and parquet files, and any other sequence of rows.

A source can be asked for its ``fingerprint`` before it is read, and much faster: a token cache is looked up by it. It covers the content
and everything in the options that changes records, and no path outside the folder that was named, so moving a folder keeps its cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from primus_odc.data.optional import optional_import
from primus_odc.data.records import Form, parse_record
from primus_odc.data.samples import Record
from primus_odc.errors import DataError


class Source(Protocol):
    """A finite, ordered collection of records."""

    @property
    def name(self) -> str:
        """For messages and manifests."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the records."""

    def __len__(self) -> int:
        """Number of records."""

    def __iter__(self) -> Iterator[Record]:
        """The records, in the same order every time."""


class JsonlSource:
    """JSON lines, one row each; empty lines are skipped. Samples are called ``FILE:LINE``.

    Args:
        files: files to read, in this order.
        root: folder that sample ids are relative to.
        form: how rows are read, see :func:`primus_odc.data.records.parse_record`.
    """

    def __init__(self, files: Sequence[Path], root: Path, form: Form) -> None:
        self.name = ", ".join(str(file) for file in files)
        self._files = [(file.relative_to(root).as_posix(), file) for file in files]
        self._form: Form = form

    @cached_property
    def fingerprint(self) -> str:
        return f"jsonl-{self._form}-{hash_files(self._files)}"

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def __iter__(self) -> Iterator[Record]:
        for sample_id, line in self._lines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{sample_id} of {self.name}: not a JSON line ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{sample_id} of {self.name}: a JSON object is wanted, not {type(row).__name__}")
            yield parse_record(row, sample_id, self._form)

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for name, file in self._files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{name}:{number}", line.removeprefix(b"\xef\xbb\xbf")


class ParquetSource:
    """Parquet files, read in batches through ``pyarrow``. Samples are called ``FILE:ROW``, from 1.

    Raises:
        DataError: pyarrow is not installed.
    """

    def __init__(self, files: Sequence[Path], root: Path, form: Form) -> None:
        self.name = ", ".join(str(file) for file in files)
        self._parquet = optional_import("pyarrow.parquet", "pyarrow", f"the parquet file {files[0]}")
        self._files = [(file.relative_to(root).as_posix(), file) for file in files]
        self._form: Form = form

    @cached_property
    def fingerprint(self) -> str:
        return f"parquet-{self._form}-{hash_files(self._files)}"

    def __len__(self) -> int:
        return sum(self._parquet.read_metadata(file).num_rows for _, file in self._files)

    def __iter__(self) -> Iterator[Record]:
        for name, file in self._files:
            with self._parquet.ParquetFile(file) as opened:
                rows = (row for batch in opened.iter_batches(batch_size=256) for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield parse_record(row, f"{name}:{number}", self._form)


class RowSource:
    """Rows that some other library holds. Samples are called ``NAME:ROW``, from 0. The fingerprint is over the rows themselves.

    Args:
        name: for sample ids and messages.
        rows: JSON-like mappings.
        form: how rows are read, see :func:`primus_odc.data.records.parse_record`.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], form: Form) -> None:
        self.name = name
        self._rows = rows
        self._form: Form = form

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.name.encode("utf-8"))
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8") + b"\n")
        return f"rows-{self._form}-{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        for i, row in enumerate(self._rows):
            yield parse_record(row, f"{self.name}:{i}", self._form)


def hash_files(files: Sequence[tuple[str, Path]]) -> str:
    """sha256 over (name, content) of all files, each read in pieces."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
