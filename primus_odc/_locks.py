"""A lock on an output of a run, held as long as its file is open and released by the kernel when the process ends, however it ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any

from primus_odc.errors import DataError


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
