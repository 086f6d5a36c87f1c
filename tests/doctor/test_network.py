"""Host name, MASTER_ADDR and interfaces, with stand-ins for the resolver and the kernel; and a resolver that never answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from primus_odc.doctor import limits, network
from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job

ONE, TWO = Job(), Job(nodes=2)
LOOPBACK, ETH, IB = {"lo": ["127.0.0.1", "::1"]}, {"eth0": ["10.0.0.5", "fe80::1"]}, {"ib0": ["10.1.0.5"]}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to; this host is called ``node-0``."""
    known: dict[str, list[str]] = {}

    def resolve(name: str) -> list[str]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known[name]

    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-0")
    return known


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("job", "resolved", "environment", "severity", "setting"),
    [
        (ONE, ["10.0.0.5"], {}, "ok", ""),
        (ONE, ["127.0.1.1"], {}, "ok", ""),
        (TWO, ["10.0.0.5"], {}, "ok", ""),
        (TWO, ["127.0.1.1"], {}, "problem", "GLOO_SOCKET_IFNAME"),
        (TWO, ["::1"], {}, "problem", "GLOO_SOCKET_IFNAME"),
        (TWO, ["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, "note", "/etc/hosts"),
        (ONE, None, {}, "note", "GLOO_SOCKET_IFNAME=lo"),
        (TWO, None, {}, "problem", "/etc/hosts"),
    ],
)
def test_host_name(
    addresses: dict[str, list[str]], job: Job, resolved: list[str] | None, environment: dict[str, str], severity: str, setting: str
) -> None:
    if resolved is not None:
        addresses["node-0"] = resolved
    finding = only(network.check_host_name(job, environment))
    assert finding.severity == severity and setting in finding.setting
    assert "node-0" in finding.found


@pytest.mark.parametrize(
    ("job", "master", "node_rank", "severity", "text"),
    [
        (ONE, "", "0", "ok", "not set"),
        (TWO, "", "0", "problem", "MASTER_ADDR=the host name"),
        (TWO, "head", "1", "ok", "10.0.0.1"),
        (ONE, "typo", "0", "problem", "does not resolve"),
        (TWO, "here", "1", "problem", "this node would wait at itself"),
        (TWO, "here", "0", "note", "leads other nodes to themselves"),
        (ONE, "here", "0", "ok", "127.0.1.1"),
    ],
)
def test_master(addresses: dict[str, list[str]], job: Job, master: str, node_rank: str, severity: str, text: str) -> None:
    addresses |= {"head": ["10.0.0.1"], "here": ["127.0.1.1"]}
    finding = only(network.check_master(job, {"MASTER_ADDR": master, "NODE_RANK": node_rank}))
    assert finding.severity == severity and text in finding.found + finding.setting


@pytest.mark.parametrize("name", ["node..1", "n" * 70, "\udcc3\udcbc"], ids=["empty label", "long label", "no text"])
def test_a_name_that_cannot_be_asked_for(name: str) -> None:
    finding = only(network.check_master(ONE, {"MASTER_ADDR": name}))
    assert finding.severity == "problem" and "does not resolve (no host name:" in finding.found


@pytest.mark.parametrize(
    ("job", "known", "environment", "expected"),
    [
        (ONE, LOOPBACK, {}, [("interfaces", "ok", "")]),
        (TWO, LOOPBACK, {}, [("interfaces", "problem", "--network host")]),
        (TWO, LOOPBACK | ETH, {}, [("interfaces", "ok", "")]),
        (TWO, LOOPBACK | ETH | IB, {}, [("interfaces", "note", "NCCL_SOCKET_IFNAME")]),
        (TWO, LOOPBACK | ETH | IB, {"NCCL_SOCKET_IFNAME": "ib"}, [("interfaces", "ok", "")]),
        (TWO, LOOPBACK | {"eth0": ["fd00::2"]}, {}, [("interfaces", "note", "NCCL_SOCKET_FAMILY=AF_INET6")]),
        (ONE, LOOPBACK | ETH, {"GLOO_SOCKET_IFNAME": "eth"}, [("GLOO_SOCKET_IFNAME", "problem", "lo, eth0"), ("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "eth"}, [("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "=eth"}, [("NCCL_SOCKET_IFNAME", "problem", "lo, eth0"), ("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "=eth0"}, [("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "^lo,docker"}, [("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "^lo,eth"}, [("NCCL_SOCKET_IFNAME", "problem", "unset"), ("interfaces", "ok", "")]),
        (ONE, LOOPBACK | ETH, {"NCCL_SOCKET_IFNAME": "bond0"}, [("NCCL_SOCKET_IFNAME", "problem", "unset"), ("interfaces", "ok", "")]),
    ],
)
def test_interfaces(
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    known: dict[str, list[str]],
    environment: dict[str, str],
    expected: list[tuple[str, str, str]],
) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: known)
    monkeypatch.setattr(network, "gpu_files", lambda: ["/dev/nvidia0"])
    findings = network.check_interfaces(job, environment)
    assert [(f.check, f.severity) for f in findings] == [(check, severity) for check, severity, _ in expected]
    assert all(setting in f.setting for f, (_, _, setting) in zip(findings, expected, strict=True))


def test_an_interface_that_nccl_would_not_find_matters_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: LOOPBACK)
    monkeypatch.setattr(network, "gpu_files", list)
    findings = network.check_interfaces(ONE, {"NCCL_SOCKET_IFNAME": "ib9", "GLOO_SOCKET_IFNAME": "ib9"})
    assert [(f.check, f.severity) for f in findings[:2]] == [("GLOO_SOCKET_IFNAME", "problem"), ("NCCL_SOCKET_IFNAME", "note")]


def test_interfaces_of_this_host_have_the_addresses_one_can_bind_to() -> None:
    known = network.interfaces()
    assert known
    for address in (address for addresses in known.values() for address in addresses if "." in address):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(network.check_loopback()).severity == "ok"

    def refuse(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    finding = only(network.check_loopback())
    assert finding.severity == "problem" and "ip link set lo up" in finding.setting


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A resolver that answers when the event is set, at the end of the test."""
    answer = threading.Event()

    def resolve(name: str) -> list[str]:
        answer.wait(50)
        return ["10.0.0.5"]

    monkeypatch.setattr(network, "resolve", resolve)
    yield answer
    answer.set()


@pytest.mark.parametrize(
    ("job", "environment", "severity", "setting"),
    [
        (ONE, {}, "note", "GLOO_SOCKET_IFNAME=lo"),
        (TWO, {}, "problem", "/etc/hosts"),
        (TWO, {"GLOO_SOCKET_IFNAME": "eth0"}, "note", "/etc/hosts"),
    ],
)
def test_a_resolver_that_hangs_costs_its_limit_and_is_told(
    hanging: threading.Event, job: Job, environment: dict[str, str], severity: str, setting: str
) -> None:
    findings = limits.start(network.checks(job, {**environment, "MASTER_ADDR": "head"}))(0.1)
    assert not hanging.is_set()  # returned although nobody answered
    by_name = {f.check: f for f in findings}
    assert by_name["host name"].severity == severity and setting in by_name["host name"].setting
    assert "no answer within 0.5 s" in by_name["host name"].found
    assert by_name["MASTER_ADDR"].severity == "problem" and "IP address of node 0" in by_name["MASTER_ADDR"].setting
    assert by_name["loopback"].severity == "ok"  # the others are not held up


def test_an_error_in_a_check_is_not_swallowed() -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError

    run: Callable[[], list[Finding]] = broken
    with pytest.raises(ZeroDivisionError):
        limits.start([limits.Check(name="x", run=run)])(1.0)
