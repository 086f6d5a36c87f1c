from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primus_odc.data.lock import file_lock
from primus_odc.errors import DataError

HOLDER = """
import sys, time
from pathlib import Path
from primus_odc.data.lock import file_lock
with file_lock(Path(sys.argv[1]), 5.0, lambda: None):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_held_lock_times_out_and_a_killed_holder_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    waited: list[int] = []
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with (
                pytest.raises(DataError, match=r"another process has held .*x\.lock for 0\.3 s"),
                file_lock(path, 0.3, lambda: waited.append(1)),
            ):
                pass
            assert waited == [1]
        finally:
            holder.send_signal(signal.SIGKILL)
    with file_lock(path, 5.0, lambda: None):
        pass


def test_the_lock_is_released_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "x.lock", 1.0, lambda: None):
        raise ZeroDivisionError
    with file_lock(tmp_path / "x.lock", 0.0, lambda: pytest.fail("still held")):
        pass
