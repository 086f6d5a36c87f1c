"""The nodes of a job meet before a communication library does: which interface each uses, and that every node reaches every other.

MORI and NVSHMEM connect their ranks over sockets of an interface they choose themselves; where that one does not lead to the other nodes (a
container's bridge, a management network) they wait for ever and say nothing. So the ranks try the path first, over the job's own store:

1. Every rank chooses an interface: ``odc.interface``, or the one by which it reaches the store. It listens at its address and puts its
   place (host, interface, address, port, a token) into the store; a rank that cannot puts what is wrong instead.
2. Every rank waits for all places. Whoever is missing when the time is over is named.
3. The first rank of every host connects from its own address to the first rank of every other host, which has to answer with its token:
   addresses of container bridges are the same on every host and would lead a rank to itself.
4. Every rank puts its verdict, waits for all, and all fail with everything that anybody found.

Nothing here outlives the call. Ranks of one host are told apart from those of another by boot id and network namespace.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from primus_odc.errors import ConfigError, PeerError
from primus_odc.symmetric.gathering import Gathering, Store
from primus_odc.symmetric.interfaces import interfaces

_POLL_S = 0.02
_CONNECT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """Where a rank can be reached."""

    rank: int
    host: str
    """Its name."""
    host_id: str
    """Boot id and network namespace."""
    interface: str
    address: str
    port: int
    token: str
    known: dict[str, list[str]]
    """All interfaces of that host with their addresses."""


def meet(
    store: Store, names: Sequence[str], rank: int, *, interface: str | None, store_address: tuple[str, int], timeout_s: float
) -> list[Place]:
    """Find the other ranks and try the way to them; every rank calls it once with a ``store`` of its own (``PrefixStore``).

    Args:
        names: of all ranks, for messages.
        interface: ``odc.interface``; None: the one by which this rank reaches ``store_address``.
        store_address: host name or address, and port, of the store (``MASTER_ADDR``, ``MASTER_PORT``).
        timeout_s: for the slowest rank to come.

    Returns:
        The places of all ranks, by rank.

    Raises:
        ConfigError: this rank's interface does not exist, has no usable address, or another rank's.
        PeerTimeoutError: ranks did not come in time; the message names them.
        PeerError: some node does not reach another; the message says which, from and to which address.
    """
    gathering = Gathering(store, rank, names, timeout_s)
    try:
        chosen, address = choose(interface, store_address)
    except ConfigError as error:
        gathering.reach("bootstrap", json.dumps({"problems": list(error.problems)}))
        raise
    token = secrets.token_hex(8)
    with _listening(address, token) as port:
        place = Place(
            rank=rank,
            host=socket.gethostname(),
            host_id=host_id(),
            interface=chosen,
            address=address,
            port=port,
            token=token,
            known=interfaces(),
        )
        answers = gathering.exchange("bootstrap", json.dumps(asdict(place)), partial(_refuse_problems, names))
        places = [Place(**json.loads(answer)) for answer in answers]
        hosts = {place.host_id: place for place in reversed(places)}  # the first rank of each host
        problems = _try(places[rank], hosts, names) if hosts[place.host_id].rank == rank else []
        verdicts = gathering.exchange("verdict of the bootstrap", json.dumps(problems), more_s=2 * _CONNECT_S)
    if found := [problem for verdict in verdicts for problem in json.loads(verdict)]:
        raise PeerError(f"{names[rank]}: the nodes do not reach each other:\n" + "\n".join(f"  - {problem}" for problem in found))
    return places


def host_id() -> str:
    """Boot id and network namespace: equal for two ranks exactly if they see the same interfaces."""
    return f"{_BOOT_ID.read_text().strip()}/{_NETWORK_NAMESPACE.stat().st_ino}"


def store_address() -> tuple[str, int]:
    """Host name or address, and port, of the job's store as torchrun tells them; an empty name where nobody did."""
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))


def choose(interface: str | None, store_address: tuple[str, int]) -> tuple[str, str]:
    """``(interface, address)`` to use on this host.

    Args:
        interface: by name; None: the one by which packets to ``store_address`` leave.

    Raises:
        ConfigError: it does not exist, or has no address that another host could use.
    """
    known = interfaces()
    told = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in known.items())
    if interface is None:
        if not store_address[0]:
            raise ConfigError(["MASTER_ADDR is not set, so it is not known which interface leads to the other machines: set odc.interface"])
        address = _local_address(store_address)
        names = [name for name, addresses in known.items() if address in addresses]
        if not names:
            raise ConfigError([f"no interface has {address}, from which this host reaches {store_address[0]}: set odc.interface ({told})"])
        return names[0], address
    if interface not in known:
        raise ConfigError([f"odc.interface: {interface} does not exist on {socket.gethostname()} or has no address; there are {told}"])
    usable = [address for address in known[interface] if not ipaddress.ip_address(address).is_link_local]
    if not usable:
        raise ConfigError([f"odc.interface: {interface} has link-local addresses only ({' '.join(known[interface])}); there are {told}"])
    return interface, usable[0]


def _local_address(store_address: tuple[str, int]) -> str:
    """The address from which packets to ``store_address`` leave; nothing is sent."""
    host, port = store_address
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            [f"no way from {socket.gethostname()} to {host}:{port} ({error}): check MASTER_ADDR, or set odc.interface"]
        ) from error


@contextlib.contextmanager
def _listening(address: str, token: str) -> Iterator[int]:
    """Answer everybody who connects to ``address`` with ``token``; gives the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:
        server.settimeout(_POLL_S)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError, ConnectionError):  # a peer that has gone finds that out itself
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(token.encode())

        thread = threading.Thread(target=serve, name="primus-odc-bootstrap", daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join(_CONNECT_S)


def _refuse_problems(names: Sequence[str], rank: int, answer: str) -> None:
    if problems := json.loads(answer).get("problems"):
        raise ConfigError([f"{names[rank]}: {problem}" for problem in problems])


def _try(own: Place, hosts: Mapping[str, Place], names: Sequence[str]) -> list[str]:
    """What is wrong with the ways from ``own`` to the first ranks of the other hosts."""
    others = [place for place in hosts.values() if place.host_id != own.host_id]
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(others))) as pool:
        return [problem for problem in pool.map(lambda peer: _problem(own, peer, names), others) if problem]


def _problem(own: Place, peer: Place, names: Sequence[str]) -> str:
    """Why ``own`` does not reach ``peer``; empty if it does."""
    if ipaddress.ip_address(peer.address).is_loopback:
        reason = "a loopback address leads nowhere else"
    else:
        try:
            with socket.create_connection((peer.address, peer.port), timeout=_CONNECT_S, source_address=(own.address, 0)) as connection:
                answer = connection.recv(2 * len(peer.token)).decode(errors="replace")
            if answer == peer.token:
                return ""
            reason = "somebody else answers there: this address belongs to several hosts"
        except OSError as error:
            reason = str(error) or type(error).__name__
    theirs = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in peer.known.items())
    return (
        f"{names[own.rank]} ({own.address}, {own.interface} of {own.host}) does not reach {names[peer.rank]} at {peer.address} "
        f"({peer.interface} of {peer.host}): {reason}. Set odc.interface to one by which all nodes reach each other; it has {theirs}"
    )
