"""The numbers by which a launcher starts a job: NNODES, NODE_RANK, MASTER_PORT, GPUS_PER_NODE and WORLD_SIZE.

A wrong one is found by torchrun after seconds, or not at all: two nodes of one rank wait for each other until the rendezvous gives up.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from primus_odc._words import counted
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.limits import Check
from primus_odc.megatron.launcher import started_by_torchrun

DEFAULT_PORT = 29500
"""What scripts/run_odc.sh and torchrun take for several nodes."""
_RESERVED = 1024


@dataclass(kw_only=True, slots=True, frozen=True)
class _Bounds:
    lowest: int
    highest: int


_BOUNDS = {
    "NNODES": _Bounds(lowest=1, highest=100000),
    "NODE_RANK": _Bounds(lowest=0, highest=99999),
    "GPUS_PER_NODE": _Bounds(lowest=1, highest=1024),
    "WORLD_SIZE": _Bounds(lowest=1, highest=10**8),
    "MASTER_PORT": _Bounds(lowest=1, highest=65535),
}


def checks(job: Job, environment: Mapping[str, str]) -> list[Check]:
    """All checks of this file."""
    return [
        Check(name="launch", run=lambda: check_numbers(job, environment)),
        Check(name="MASTER_PORT", run=lambda: check_port(job, environment)),
    ]


def whole(text: str, lowest: int, highest: int) -> int | None:
    """``text`` as a whole number in decimal digits within bounds; None where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and lowest <= int(text) <= highest else None


def number(environment: Mapping[str, str], variable: str, default: int) -> int | None:
    """The number that ``variable`` holds; ``default`` where it is unset or empty, None where it is none."""
    text = environment.get(variable)
    return whole(text, _BOUNDS[variable].lowest, _BOUNDS[variable].highest) if text else default


def check_numbers(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Whether every number is one, and this node among those of the job."""
    findings = [
        Finding(
            check=variable,
            severity="problem",
            found=f"{variable}={environment[variable]} is not a whole number from {bounds.lowest} to {bounds.highest}",
            setting=f"unset {variable}, or set it to such a number",
        )
        for variable, bounds in _BOUNDS.items()
        if number(environment, variable, bounds.lowest) is None
    ]
    rank = number(environment, "NODE_RANK", 0)
    if rank is not None and rank >= job.nodes:
        findings.append(
            Finding(
                check="NODE_RANK",
                severity="problem",
                found=f"NODE_RANK={rank} of {counted(job.nodes, 'node')}: nodes are numbered from 0 to {job.nodes - 1}",
                setting=f"set NODE_RANK to this node's own number below {job.nodes}, or NNODES (doctor: --nodes) to the number of nodes",
            )
        )
    if job.nodes > 1 and not environment.get("NODE_RANK"):
        setting = "export NODE_RANK, this node's own number, on every node but node 0"
        findings.append(Finding(check="NODE_RANK", severity="note", found="not set, so this node takes itself for node 0", setting=setting))
    return findings or [Finding(check="launch", severity="ok", found=f"node {rank} of {job.nodes}")]


def check_port(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Whether node 0 can open the rendezvous' port."""
    port = number(environment, "MASTER_PORT", DEFAULT_PORT)
    if port is None:
        return []  # told by check_numbers
    given = bool(environment.get("MASTER_PORT"))
    if not given and job.nodes == 1 and not environment.get("MASTER_ADDR"):
        return [Finding(check="MASTER_PORT", severity="ok", found="not set; one node takes any free port")]
    name = f"port {port}" if given else f"port {port} (the default)"
    setting = "set MASTER_PORT to a free port from 1024 to 65535, the same on every node"
    if started_by_torchrun(environment):
        return [Finding(check="MASTER_PORT", severity="ok", found=f"{name}, in use by the job that this process belongs to")]
    if number(environment, "NODE_RANK", 0) == 0:
        reason = _refusal(port)
        if reason is not None:
            return [Finding(check="MASTER_PORT", severity="problem", found=f"{name} cannot be opened here: {reason}", setting=setting)]
    if port < _RESERVED:
        found = f"{name} is one of those reserved for services of the system"
        return [Finding(check="MASTER_PORT", severity="note", found=found, setting=setting)]
    return [Finding(check="MASTER_PORT", severity="ok", found=name)]


def _refusal(port: int) -> str | None:
    """Why this process cannot listen on ``port``; None where it can."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does: only a listener is in the way
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        known = {errno.EADDRINUSE: "another process listens on it", errno.EACCES: f"ports below {_RESERVED} are for privileged processes"}
        return known.get(error.errno or 0) or str(error)
    return None
