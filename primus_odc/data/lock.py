"""A lock between processes that dies with its holder."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from primus_odc.errors import DataError

_POLL_S = 0.1


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
        deadline = time.monotonic() + timeout_s
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"another process has held {path} for {timeout_s:g} s; if it is still building the token cache, wait longer or "
                        "build the cache beforehand in one process, else end that process"
                    ) from None
            except OSError as error:
                raise DataError(f"{path} cannot be locked ({error.strerror}); put the cache on a local disk (data_cache_path)") from error
            if not waiting:
                waiting = True
                on_wait()
            time.sleep(_POLL_S)
        yield
