"""A rank for the tests of primus_odc.megatron.local_ranks: ``python -m tests.megatron.rank_program RANK FOLDER [FAULT WHO]``.

It leaves its process id in FOLDER. FAULT is what rank WHO does: ``fail``, ``kill`` (itself) or ``wait`` (all ranks, whoever WHO is).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from primus_odc.megatron.local_ranks import end_with_parent


def main(rank: int, folder: Path, fault: str, who: int) -> None:
    end_with_parent()
    partial = folder / f"partial{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"pid{rank}")
    print(f"rank {rank} speaks", flush=True)
    if rank == who and fault == "fail":
        print("the reason of it", file=sys.stderr, flush=True)
        os._exit(3)
    if rank == who and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault:
        time.sleep(60)


if __name__ == "__main__":
    words = sys.argv[3:] or ["", "0"]
    main(int(sys.argv[1]), Path(sys.argv[2]), words[0], int(words[1]))
