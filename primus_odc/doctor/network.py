"""Host name, MASTER_ADDR and interfaces: what otherwise ends in a hang of the process group.

gloo binds to the address that the host name resolves to, unless GLOO_SOCKET_IFNAME names an interface; NCCL and RCCL take
NCCL_SOCKET_IFNAME or the first interface they find usable. Between nodes an address of the loopback network reaches nobody.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from primus_odc.doctor.finding import Finding, Severity
from primus_odc.doctor.job import Job
from primus_odc.doctor.limits import Check
from primus_odc.doctor.system import gpu_files
from primus_odc.symmetric.interfaces import interfaces

_LIMIT_S = 5.0
RDMA = Path("/sys/class/infiniband")


def checks(job: Job, environment: Mapping[str, str]) -> list[Check]:
    """All checks of this file."""
    several = job.nodes > 1
    bind = _bind_to("lo") if not several else "fix the resolver (/etc/hosts or DNS), or " + _bind_to("INTERFACE")
    return [
        Check(
            name="host name",
            run=lambda: check_host_name(job, environment),
            limit_s=_LIMIT_S,
            late=f"gloo asks for this host's own name when the process group is made and would wait as well: {bind}",
            late_severity="problem" if several and not environment.get("GLOO_SOCKET_IFNAME") else "note",
        ),
        Check(
            name="MASTER_ADDR",
            run=lambda: check_master(job, environment),
            limit_s=_LIMIT_S,
            late="set MASTER_ADDR to an IP address of node 0, or repair name resolution (/etc/hosts, DNS)",
            late_severity="problem",
        ),
        Check(name="interfaces", run=lambda: check_interfaces(job, environment)),
        Check(name="loopback", run=check_loopback),
        Check(name="RDMA", run=check_rdma),
    ]


def _bind_to(interface: str) -> str:
    return f"export GLOO_SOCKET_IFNAME={interface}"


def resolve(name: str) -> list[str]:
    """The addresses of a host name, each once; may take as long as the resolver likes.

    Raises:
        OSError: there are none.
    """
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # Python encodes names before it asks: one with an empty label, or with bytes that are no text
        raise OSError(f"no host name: {error.__cause__ or error}") from error
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def check_host_name(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Whether this host's own name leads to an address that others reach."""
    name = socket.gethostname()
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    several = job.nodes > 1
    severity: Severity = "problem" if several and not chosen else "note"
    setting = f"add this host's address and name to /etc/hosts, or {_bind_to('INTERFACE' if several else 'lo')}"
    try:
        addresses = resolve(name)
    except OSError as error:
        return [Finding(check="host name", severity=severity, found=f"{name} does not resolve ({error})", setting=setting)]
    loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    found = f"{name} resolves to {', '.join(addresses)}"
    if loopback and several:
        return [Finding(check="host name", severity=severity, found=f"{found}, which other nodes cannot reach", setting=setting)]
    return [Finding(check="host name", severity="ok", found=f"{found}{' (enough for one node)' if loopback else ''}")]


def check_master(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the rendezvous address can be found from here."""
    master = environment.get("MASTER_ADDR")
    if not master:
        if job.nodes == 1:
            return [Finding(check="MASTER_ADDR", severity="ok", found="not set; one node needs none")]
        return [
            Finding(
                check="MASTER_ADDR",
                severity="problem",
                found=f"not set, and {job.nodes} nodes have to meet somewhere",
                setting="export MASTER_ADDR=the host name or address of node 0, the same on every node",
            )
        ]
    try:
        addresses = resolve(master)
    except OSError as error:
        return [
            Finding(
                check="MASTER_ADDR",
                severity="problem",
                found=f"{master} does not resolve ({error})",
                setting="set MASTER_ADDR to an IP address of node 0, or add the name to /etc/hosts",
            )
        ]
    found = f"{master} resolves to {', '.join(addresses)}"
    if job.nodes > 1 and any(ipaddress.ip_address(address).is_loopback for address in addresses):
        setting = "set MASTER_ADDR to an address of node 0 that all nodes reach"
        if environment.get("NODE_RANK", "0") == "0":
            # Debian gives a host its own name at 127.0.1.1; node 0 finds itself there.
            return [Finding(check="MASTER_ADDR", severity="note", found=f"{found}, which leads other nodes to themselves", setting=setting)]
        return [Finding(check="MASTER_ADDR", severity="problem", found=f"{found}: this node would wait at itself", setting=setting)]
    return [Finding(check="MASTER_ADDR", severity="ok", found=found)]


def check_interfaces(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """The interfaces that have an address, and whether those that the environment names are among them."""
    known = interfaces()
    findings = [
        Finding(
            check=variable,
            severity="problem" if variable.startswith("GLOO") or gpu_files() else "note",
            found=f"{variable}={environment[variable]} names no interface of this host that has an address",
            setting=f"unset {variable}, or set it to one of {', '.join(known) or 'none'}",
        )
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if environment.get(variable) and not _names_one(variable, environment[variable], known)
    ]
    outer = {name: addresses for name, addresses in known.items() if not all(ipaddress.ip_address(a).is_loopback for a in addresses)}
    listing = "; ".join(f"{name} {' '.join(addresses)}" for name, addresses in outer.items()) or "none besides loopback"
    severity: Severity = "ok"
    setting = ""
    if not outer and job.nodes > 1:
        severity, setting = "problem", "give this node (or its container: --network host) an interface that the other nodes reach"
    elif len(outer) > 1 and job.nodes > 1 and not environment.get("NCCL_SOCKET_IFNAME"):
        severity = "note"
        setting = "if nodes do not find each other: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the interface all nodes share"
    elif outer and job.nodes > 1 and all(":" in address for addresses in outer.values() for address in addresses):
        severity = "note"
        setting = "these are IPv6 addresses only: export NCCL_SOCKET_FAMILY=AF_INET6, and let MASTER_ADDR be one or a name of one"
    return [*findings, Finding(check="interfaces", severity=severity, found=listing, setting=setting)]


def _names_one(variable: str, value: str, known: Mapping[str, object]) -> bool:
    """gloo: a list of names. NCCL: a list of beginnings of names, of whole names after ``=``, of what not to use after ``^``."""
    if variable == "GLOO_SOCKET_IFNAME":
        return all(name.strip() in known for name in value.split(","))
    mode, names = ("", value) if value[:1] not in ("=", "^") else (value[0], value[1:].lstrip("="))
    listed = [name.partition(":")[0] for name in names.split(",") if name]
    if mode == "^":
        return any(not name.startswith(tuple(listed)) for name in known)
    return any(name in listed if mode == "=" else name.startswith(tuple(listed)) for name in known)


def check_loopback() -> list[Finding]:
    """Whether processes of this host can meet at 127.0.0.1, as `run_odc.sh` has them on one node."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        setting = "bring the loopback interface up: ip link set lo up"
        return [Finding(check="loopback", severity="problem", found=f"127.0.0.1 cannot be used ({error.strerror})", setting=setting)]
    return [Finding(check="loopback", severity="ok", found="127.0.0.1 can be used")]


def check_rdma() -> list[Finding]:
    """RDMA adapters, which carry what goes between nodes: on demand (``nvshmem``, ``mori``) and of collectives."""
    adapters = sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []
    found = f"{len(adapters)} RDMA adapters ({', '.join(adapters)})" if adapters else "no RDMA adapter"
    return [Finding(check="RDMA", severity="ok", found=found)]
