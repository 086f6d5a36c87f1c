"""Python's own standard library as offline text: real, long-tailed, and on every machine that runs Python.

Left out are tests, installed packages, generated files, and packages that distributions split off (so that an operating system's Python
gives the same text as any other of its version). Files come in the order of their names below the library's root, and the root itself
enters nothing: two installations of one Python version give the same samples.
"""

from __future__ import annotations

import re
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from primus_odc.data.records import Form
from primus_odc.data.samples import Record, Turn
from primus_odc.data.sources import hash_files
from primus_odc.errors import DataError

Unit = Literal["definition", "file"]
"""What one sample is: a top-level function or class (or what stands before the first one of a file), or a whole file."""

_LEFT_OUT = frozenset(
    # tests and what is not the library's own
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
    # separate packages in common distributions, or gone in newer versions
    + ("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo")
    # generated tables
    + ("encodings", "pydoc_data")
)
_TOP_LEVEL = re.compile(r"^(@|class |def |async def )", re.MULTILINE)


class StdlibSource:
    """The library's sources. A file's sample is called by its name below the root, a definition's by ``NAME#NUMBER``.

    Args:
        unit: what one sample is.
        form: ``text``, or ``conversation``: the first half of the lines is the prompt, the rest the reply.
        root: another folder of Python sources to read instead.

    Raises:
        DataError: no source lies there (a Python that keeps its library in an archive).
    """

    def __init__(self, unit: Unit = "definition", form: Form = "text", root: Path | None = None) -> None:
        self._unit: Unit = unit
        self._form: Form = form
        root = root or Path(sysconfig.get_path("stdlib"))
        names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py") if file.is_file())
        self._files = [(name, root / name) for name in names if not _left_out(name)]
        self.name = f"standard library, by {unit}"
        if not self._files:
            raise DataError(f"no Python source below {root}: this Python keeps its library elsewhere; choose another sft_dataset_name")

    @cached_property
    def fingerprint(self) -> str:
        return f"stdlib-{self._unit}-{self._form}-{hash_files(self._files)}"

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self._pieces())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        for sample_id, text in self._pieces():
            if self._form == "text":
                yield Record(sample_id=sample_id, turns=(Turn(role="text", text=text),))
            else:
                prompt, reply = halves(text)
                yield Record(sample_id=sample_id, turns=(Turn(role="user", text=prompt), Turn(role="assistant", text=reply)))

    def _pieces(self) -> Iterator[tuple[str, str]]:
        for name, file in self._files:
            with tokenize.open(file) as opened:
                text = opened.read()
            if self._unit == "file":
                if text.strip():
                    yield name, text
            else:
                yield from ((f"{name}#{i}", piece) for i, piece in enumerate(definitions(text)))


def definitions(text: str) -> list[str]:
    """Cut a source before every top-level function and class, decorators included. The pieces joined are the text, but for blank pieces."""
    starts = [0]
    decorated = False
    for match in _TOP_LEVEL.finditer(text):
        if not decorated:
            starts.append(match.start())
        decorated = match.group(1) == "@"
    pieces = (text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True))
    return [piece for piece in pieces if piece.strip()]


def halves(text: str) -> tuple[str, str]:
    """Cut after half of the lines, the first part being the smaller; a single line is cut after half of its characters."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 2:
        return text[: len(text) // 2], text[len(text) // 2 :]
    return "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])


def _left_out(name: str) -> bool:
    parts = name.split("/")
    return not _LEFT_OUT.isdisjoint(parts) or parts[0].startswith(("_sysconfigdata", "config-"))
