"""Locks on files and folders: held while a file is open, released by the kernel when the process ends, however."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from primus_odc.errors import DataError

FOLDER_LOCK = "run.lock"
"""The file in a folder of outputs that is locked while a run writes there; it stays behind, unlocked."""
_POLL_S = 0.1


def lock_folder(folder: Path, key: str, *, busy: str) -> IO[bytes]:
    """Make ``folder`` where it is missing, and keep other runs out of it until the returned file is closed.

    Args:
        folder: where a run writes.
        key: the key or option that names it, for messages.
        busy: the message where another process holds the folder.

    Raises:
        DataError: another process holds it, or it cannot be written to or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FOLDER_LOCK).open("ab")
    except OSError as error:
        raise DataError(f"{key}: {folder} cannot be written: {error.strerror}; choose another folder") from error
    try:
        lock_open_file(file, str(folder), busy=busy, remedy=no_locks(key))
    except DataError:
        file.close()
        raise
    return file


def unwritable(key: str, folder: Path) -> list[str]:
    """One sentence where a run could not write into ``folder``, which ``key`` names and which need not be there yet."""
    # The first one that there is, from the folder itself upwards, decides whether the rest can be made.
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return []
    return [f"{key}: {folder} cannot be made, {there} is no folder that can be written to; choose another folder"]


def no_locks(key: str) -> str:
    """What to do where the file system of the folder that ``key`` names knows no locks."""
    return f"put {key} on a file system that knows locks"


def lock_open_file(file: IO[Any], what: str, *, busy: str, remedy: str, shared: bool = False) -> None:
    """Lock ``file`` until it is closed, or refuse at once.

    Args:
        file: an open file; for an exclusive lock it is open for writing.
        what: the output that is locked, for messages.
        busy: the message where another process holds the lock.
        remedy: what to change where the file system knows no locks.
        shared: only exclusive locks are in the way, so that all ranks of a run can ask at the same time.

    Raises:
        DataError: another process holds the lock, or the file system knows none.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(busy) from None
    except OSError as error:
        raise DataError(f"{what} cannot be locked: {error.strerror}; {remedy}") from error


def wait_for_lock(file: IO[Any], timeout_s: float, on_wait: Callable[[], None] = lambda: None, *, late: str, remedy: str) -> None:
    """Lock ``file``, open for writing, until it is closed; another process that holds the lock is waited for.

    Args:
        timeout_s: seconds to wait.
        on_wait: called once when another process holds the lock.
        late: the message where it does so after ``timeout_s``.
        remedy: what to change where the file system knows no locks.

    Raises:
        DataError: another process still holds the lock, or the file system knows none.
    """
    deadline = time.monotonic() + timeout_s
    waiting = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise DataError(late) from None
        except OSError as error:
            raise DataError(f"{file.name} cannot be locked ({error.strerror}); {remedy}") from error
        if not waiting:
            waiting = True
            on_wait()
        time.sleep(_POLL_S)
