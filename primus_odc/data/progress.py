"""A progress bar where ``tqdm`` is installed, a line per 10 % where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """Yield ``items`` and show on stderr how far they are.

    Args:
        items: what to go through.
        total: how many they are.
        title: what is being done.
    """
    if importlib.util.find_spec("tqdm") is None:
        return _with_lines(items, total, title)
    return iter(importlib.import_module("tqdm").tqdm(items, total=total, desc=title, unit=" samples", file=sys.stderr))


def _with_lines(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    started = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if done * 10 // total != (done - 1) * 10 // total:
            print(
                f"{title}: {done * 10 // total * 10} % ({done} of {total}, {time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True
            )
