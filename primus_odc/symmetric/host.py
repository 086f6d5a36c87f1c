"""Host transport: shared segments between the processes of one machine, without a name anywhere.

A segment is a ``memfd_create`` file. Its descriptor travels to the peers over Unix sockets in the abstract namespace
(``SCM_RIGHTS``), so neither the segment nor the socket exists in any file system: when the last process ends, by whatever means, the
kernel frees both. ``posix_fallocate`` commits the pages up front, so a machine that is short of memory says so at start instead of
sending ``SIGBUS`` in the middle of a step.

Bootstrap of rank r of W; steps 3 and 4 are under one time-out, step 2 is under that of the process group, which is where early ranks
wait for late ones:
1. listen on a fresh abstract address;
2. exchange ``(boot id, network namespace, address, size, available memory)`` over the job's existing process group, and refuse
   together what cannot work; from here on ranks of other nodes, if any, play no part;
3. make the segment, connect to every lower rank and accept every higher one; both ends send their rank and their descriptor;
4. map every peer's segment. The sockets stay open for :mod:`primus_odc.symmetric.liveness`.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from primus_odc.errors import OdcError, PeerTimeoutError
from primus_odc.symmetric.bootstrap import host_id

Exchange = Callable[[Any], list[Any]]
"""All-gather of one picklable object per rank, in rank order; collective."""

CGROUP = "/sys/fs/cgroup"
"""Where a process sees its own memory cgroup (version 2)."""

_HELLO = struct.Struct("=qq")  # rank, segment size in bytes


@dataclass
class HostMesh:
    """The segment of every rank of this node, mapped here, and an open socket to every other one."""

    segments: dict[int, mmap.mmap]
    sockets: dict[int, socket.socket]


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others about itself before they can connect."""

    host: str
    """Boot id and network namespace."""
    address: str
    nbytes: int
    available: int


def require_host_transport() -> None:
    """Refuse machines on which plain stores and loads do not order the control words (see :mod:`primus_odc.symmetric.words`)."""
    if not hasattr(os, "memfd_create"):
        raise OdcError("transport 'host' needs memfd_create (Linux 3.17 or later, Python built against glibc 2.27 or later)")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OdcError(
            f"the control words in host memory rely on the store order of x86-64 and this machine is {platform.machine()}; on-demand "
            "communication is not available here: set comm_backend: nccl_pad"
        )


def available_memory() -> int:
    """Bytes this machine (or the memory cgroup, where it is tighter) can still give."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with open(f"{CGROUP}/memory.max") as maximum, open(f"{CGROUP}/memory.current") as current, open(f"{CGROUP}/memory.stat") as stat:
            limit = maximum.read().strip()
            if limit != "max":
                # Cached file pages are charged to the cgroup too, and given up on demand: a dataset read once must not count as used.
                usage = dict(line.split() for line in stat)
                cached = int(usage["inactive_file"]) + int(usage["active_file"])
                available = min(available, int(limit) - int(current.read()) + cached)
    except FileNotFoundError:
        pass  # no cgroup v2 memory controller here: /proc/meminfo alone decides
    return available


def make_segment(nbytes: int, rank: int) -> int:
    """Create and commit an anonymous shared segment; returns its descriptor."""
    fd = os.memfd_create(f"primus_odc_rank{rank}", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise OdcError(f"rank {rank}: cannot commit {nbytes / 2**20:.1f} MiB of shared memory: {error.strerror}") from error
    return fd


def connect_host_mesh(
    rank: int, world_size: int, nbytes: int, exchange: Exchange, timeout_s: float, nodes: Sequence[int] | None = None
) -> HostMesh:
    """Make this rank's segment and map those of its node; collective over the ranks of ``exchange``.

    Args:
        rank, world_size: this process among the ranks that share the heap.
        nbytes: size of each rank's segment; must be equal on all ranks.
        exchange: all-gather over those ranks, in rank order.
        timeout_s: limit for connecting once ``exchange`` has returned; a missing peer is named.
        nodes: the node of every rank; None: all ranks share one.
    """
    nodes = [0] * world_size if nodes is None else nodes
    near = [r for r in range(world_size) if nodes[r] == nodes[rank]]
    require_host_transport()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"primus_odc-{uuid.uuid4().hex}"
    listener.bind("\0" + address)
    listener.listen(world_size)
    card = _Card(host_id(), address, nbytes, available_memory())
    try:
        cards: list[_Card] = exchange(card)
        deadline = time.monotonic() + timeout_s
        _check_cards(cards, rank, nodes)
        fd = make_segment(nbytes, rank)
    except BaseException:
        listener.close()
        raise
    sockets: dict[int, socket.socket] = {}
    unknown: list[socket.socket] = []  # accepted, rank not told yet
    descriptors = {rank: fd}
    try:
        for peer in (r for r in near if r < rank):
            sockets[peer] = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(_left(deadline))
            sock.connect("\0" + cards[peer].address)
            _send_hello(sock, rank, nbytes, fd)
            _receive_hello(sock, descriptors, nbytes)
        while len(sockets) < len(near) - 1:
            listener.settimeout(_left(deadline))
            sock, _ = listener.accept()
            if _peer_uid(sock) != os.getuid():
                sock.close()  # abstract addresses are open to every user of the host; only our own processes are peers
                continue
            unknown.append(sock)
            sock.settimeout(_left(deadline))
            peer = _receive_hello(sock, descriptors, nbytes)
            sockets[peer] = unknown.pop()
            _send_hello(sock, rank, nbytes, fd)
    except BaseException as error:
        missing = sorted(set(near) - set(descriptors))
        for sock in [*sockets.values(), *unknown]:
            sock.close()
        for descriptor in descriptors.values():
            os.close(descriptor)
        if not isinstance(error, (TimeoutError, ConnectionError, EOFError)):
            raise
        raise PeerTimeoutError(f"rank {rank}: ranks {missing} did not join the heap within {timeout_s:g} s ({error!r})") from error
    finally:
        listener.close()
    try:
        segments = {r: mmap.mmap(descriptors[r], nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) for r in near}
    except OSError as error:
        for sock in sockets.values():
            sock.close()
        raise OdcError(
            f"rank {rank}: cannot map the shared memory of {len(near)} ranks, {nbytes / 2**20:.1f} MiB each: {error.strerror}; raise the "
            "limit of address space (ulimit -v), or use fewer ranks"
        ) from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)  # the mapping keeps the segment alive
    return HostMesh(segments, sockets)


def _peer_uid(sock: socket.socket) -> int:
    """User of the process at the other end (``SO_PEERCRED``, unix(7))."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _check_cards(cards: list[_Card], rank: int, nodes: Sequence[int]) -> None:
    """All ranks find the same, whatever their node, and so refuse together."""
    sizes = {c.nbytes for c in cards}
    if len(sizes) != 1:
        raise OdcError(f"rank {rank}: the ranks plan arenas of different sizes {sorted(sizes)}: the models or options differ")
    for node in sorted(set(nodes), key=lambda node: node != nodes[rank]):  # the own one first
        members = [r for r, n in enumerate(nodes) if n == node]
        first = cards[rank if node == nodes[rank] else members[0]]
        elsewhere = [r for r in members if cards[r].host != first.host]
        if elsewhere and len(members) == len(nodes):
            raise OdcError(
                f"rank {rank}: ranks {elsewhere} run on another host or in another network namespace; odc.transport 'host' reaches "
                "one host and one namespace only (containers of one host can share it with --network=host)"
            )
        if elsewhere:
            raise OdcError(
                f"rank {rank}: of the ranks {members} of one node, {elsewhere} run on another host or in another network namespace than "
                "the others: odc.ranks_per_node has to be the number of ranks that share a host (containers of one host can share it with "
                "--network=host)"
            )
        total, available = sum(cards[r].nbytes for r in members), min(cards[r].available for r in members)
        if total > available:
            raise OdcError(
                f"rank {rank}: the arenas of {len(members)} ranks need {total / 2**30:.2f} GiB and their host has {available / 2**30:.2f} "
                "GiB left; use fewer ranks, odc.accumulate: owner, or a smaller model"
            )


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("bootstrap deadline passed")
    return left


def _send_hello(sock: socket.socket, rank: int, nbytes: int, fd: int) -> None:
    socket.send_fds(sock, [_HELLO.pack(rank, nbytes)], [fd])


def _receive_hello(sock: socket.socket, descriptors: dict[int, int], nbytes: int) -> int:
    data, fds, _, _ = socket.recv_fds(sock, _HELLO.size, 1)
    if len(data) < _HELLO.size or len(fds) != 1:
        raise EOFError("the peer closed its socket during the bootstrap")
    peer, peer_nbytes = _HELLO.unpack(data)
    descriptors[peer] = fds[0]  # whoever calls closes it
    if peer_nbytes != nbytes:
        raise OdcError(f"rank {peer} brought a segment of {peer_nbytes} bytes, expected {nbytes}")
    return int(peer)
