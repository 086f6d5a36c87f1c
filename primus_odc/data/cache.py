"""Tokens on disk: built once per host, opened memory-mapped by every rank.

An entry is a folder named by the hash of what decides its content (source, tokenizer, template, limit). It holds raw little-endian arrays,
the sample ids as JSON, and ``manifest.json`` with the size and sha256 of each file; nothing in it can execute, as a pickle could.

Of several processes that want an entry at once, the one that gets the lock builds it into ``KEY.partial-HOST``, flushes it to disk and
renames it; the others wait and open it. So an entry under its final name is complete. A builder that is killed loses its lock with its
life: the next process throws the partial folder away and builds. Every opening checks sizes and checksums: a disk that lost or changed a
byte is reported, never trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from primus_odc.data.lock import file_lock
from primus_odc.data.samples import Sample
from primus_odc.errors import DataError

FORMAT = 1
_MANIFEST = "manifest.json"
_TOKENS, _TARGETS, _OFFSETS, _COUNTS, _IDS = "tokens.i4", "targets.u1", "offsets.i8", "target_counts.i8", "ids.json"
_FILES = (_TOKENS, _TARGETS, _OFFSETS, _COUNTS, _IDS)


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenCache:
    """An opened entry; the arrays are read only."""

    path: Path
    """The entry's folder."""
    key: str
    """Hash of what decided the content."""
    tokens: npt.NDArray[np.int32]
    """All samples one after the other, int32 of shape [total tokens]."""
    target_mask: npt.NDArray[np.bool_]
    """bool of shape [total tokens]."""
    offsets: npt.NDArray[np.int64]
    """Sample i is at ``offsets[i]:offsets[i + 1]``; int64 of shape [samples + 1]."""
    target_counts: npt.NDArray[np.int64]
    """Targets of each sample, int64 of shape [samples]."""
    ids: tuple[str, ...]
    """Sample ids."""


def cache_key(parts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits over ``parts``, which are JSON values."""
    return hashlib.sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True).encode()).hexdigest()[:32]


def open_or_build(directory: Path, parts: Mapping[str, Any], samples: Iterable[Sample], title: str, timeout_s: float) -> TokenCache:
    """Open the entry for ``parts``; build it from ``samples`` first where it does not exist.

    Args:
        directory: folder of all entries, created when missing.
        parts: JSON values that decide the content; they stand in the manifest.
        samples: the content, read only when the entry has to be built.
        title: what is built, for messages and the manifest.
        timeout_s: seconds to wait for another process that is building the entry.

    Raises:
        DataError: the entry is corrupt, has no sample, or another process did not finish in time.
    """
    key = cache_key(parts)
    entry = directory / key
    if not entry.exists():
        directory.mkdir(parents=True, exist_ok=True)

        def tell() -> None:
            print(f"waiting for another process to build the token cache of {title}", file=sys.stderr, flush=True)

        with file_lock(directory / f"{key}.lock", timeout_s, tell):
            if not entry.exists():
                _build(entry, parts, samples, title)
    return open_cache(entry)


def open_cache(entry: Path) -> TokenCache:
    """Open and check an entry.

    Raises:
        DataError: a file is missing, or its size or checksum differs from the manifest; names the file and the folder to delete.
    """
    try:
        manifest = json.loads((entry / _MANIFEST).read_bytes())
        files = {name: (int(manifest["files"][name]["bytes"]), str(manifest["files"][name]["sha256"])) for name in _FILES}
        samples = int(manifest["samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(entry, f"{_MANIFEST} cannot be read ({error!r})") from error
    for name, (size, checksum) in files.items():
        try:
            found = (entry / name).stat().st_size
            if found != size:
                raise _corrupt(entry, f"{name} has {found} bytes instead of {size}")
            if _sha256(entry / name) != checksum:
                raise _corrupt(entry, f"{name} has another checksum than when it was written")
        except OSError as error:
            raise _corrupt(entry, f"{name} cannot be read ({error.strerror})") from error
    cache = TokenCache(
        path=entry,
        key=entry.name,
        tokens=_mapped(entry / _TOKENS, "<i4"),
        target_mask=_mapped(entry / _TARGETS, "u1").view(np.bool_),
        offsets=_mapped(entry / _OFFSETS, "<i8"),
        target_counts=_mapped(entry / _COUNTS, "<i8"),
        ids=tuple(json.loads((entry / _IDS).read_bytes())),
    )
    shapes = (cache.offsets.size, cache.target_counts.size, len(cache.ids), cache.tokens.size, cache.target_mask.size)
    total = int(cache.offsets[-1])
    if shapes != (samples + 1, samples, samples, total, total):
        raise _corrupt(entry, f"the files do not agree on {samples} samples and {total} tokens")
    return cache


def _build(entry: Path, parts: Mapping[str, Any], samples: Iterable[Sample], title: str) -> None:
    partial = entry.with_name(f"{entry.name}.partial-{socket.gethostname()}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    ids: list[str] = []
    lengths: list[int] = []
    counts: list[int] = []
    with (partial / _TOKENS).open("wb") as tokens, (partial / _TARGETS).open("wb") as targets:
        for sample in samples:
            tokens.write(sample.tokens.astype("<i4").tobytes())
            targets.write(sample.target_mask.tobytes())
            ids.append(sample.sample_id)
            lengths.append(sample.tokens.size)
            counts.append(int(sample.target_mask.sum()))
        _flush(tokens)
        _flush(targets)
    if not ids:
        raise DataError(f"{title}: the source has no sample")
    if len(set(ids)) != len(ids):
        raise DataError(f"{title}: the sample id {Counter(ids).most_common(1)[0][0]!r} occurs more than once")
    _write(partial / _OFFSETS, np.cumsum([0, *lengths]).astype("<i8").tobytes())
    _write(partial / _COUNTS, np.array(counts).astype("<i8").tobytes())
    _write(partial / _IDS, json.dumps(ids).encode())
    files = {name: {"bytes": (partial / name).stat().st_size, "sha256": _sha256(partial / name)} for name in _FILES}
    manifest = {
        "title": title,
        "samples": len(ids),
        "tokens": sum(lengths),
        "targets": sum(counts),
        "made_from": dict(parts),
        "files": files,
    }
    _write(partial / _MANIFEST, json.dumps(manifest, indent=1).encode())
    try:
        partial.rename(entry)
    except OSError:
        # On a shared file system another host may have finished the same entry; its content is the same.
        if not entry.exists():
            raise
        shutil.rmtree(partial)


def _corrupt(entry: Path, what: str) -> DataError:
    return DataError(f"the token cache {entry} is damaged: {what}; delete this folder and it is built again")


def _mapped(file: Path, dtype: str) -> Any:
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        _flush(opened)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
