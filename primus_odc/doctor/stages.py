"""The child process of the doctor: runs the stages it is told, in order, and writes a JSON line after each.

Started by :mod:`primus_odc.doctor.child` as ``python -m primus_odc.doctor.stages DESCRIPTOR`` with the stages and the job as JSON on its
standard input. Lines go to the descriptor, because anybody may print to standard output. An error that no stage foresees ends the
process, and the parent says so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

from primus_odc.doctor.finding import Finding
from primus_odc.doctor.gpus import check_gpus
from primus_odc.doctor.job import Job
from primus_odc.doctor.memory import check_memory_of_run
from primus_odc.doctor.packages import check_packages, use_primus
from primus_odc.doctor.run import check_run

STAGES: dict[str, Callable[[Job], list[Finding]]] = {
    "packages": check_packages,
    "gpus": check_gpus,
    "run": check_run,
    "memory": check_memory_of_run,
}


def main() -> None:
    """Run the stages that standard input names."""
    order = json.load(sys.stdin)
    job = Job(**order["job"])
    if job.primus_path and "packages" not in order["stages"]:
        use_primus(job.primus_path)  # that stage was the end of the process before this one
    # Left open: where an error ends this process, the parent reads what it said as soon as the descriptor is closed.
    lines = os.fdopen(int(sys.argv[1]), "w")
    for name in order["stages"]:
        findings = STAGES[name](job)
        print(json.dumps({"stage": name, "findings": [asdict(f) for f in findings], "facts": job.facts}), file=lines, flush=True)
    # Libraries that were imported may want to wait for something at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
