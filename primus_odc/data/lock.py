"""A lock between processes that dies with its holder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from primus_odc._locks import wait_for_lock


@contextmanager
def file_lock(path: Path, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive ``flock`` on ``path``, which is created and stays.

    The kernel releases it when the holder ends, however it ends, so there is no stale lock to clean up.

    Args:
        path: file to lock; its folder exists.
        timeout_s: seconds to wait for another holder.
        on_wait: called once when another process holds the lock.

    Raises:
        DataError: another process still holds it after ``timeout_s``, or the file system knows no locks.
    """
    with path.open("ab") as file:
        late = (
            f"another process has held {path} for {timeout_s:g} s; if it is still building the token cache, wait longer or build the cache "
            "beforehand in one process, else end that process"
        )
        wait_for_lock(file, timeout_s, on_wait, late=late, remedy="put the cache on a local disk (data_cache_path)")
        yield
