"""How threads of this package end."""

from __future__ import annotations

import threading


def stop_thread(thread: threading.Thread, stopping: threading.Event, timeout_s: float) -> None:
    """Have ``thread``, which looks at ``stopping``, end, and wait for it ``timeout_s`` at most; for ``weakref.finalize`` too."""
    stopping.set()
    if threading.current_thread() is not thread:  # the garbage collector may run in any thread
        thread.join(timeout=timeout_s)
