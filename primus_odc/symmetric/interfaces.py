"""Network interfaces of this host and their addresses (netdevice(7), ``/proc/net/if_inet6``)."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7)
INET6 = Path("/proc/net/if_inet6")


def interfaces() -> dict[str, list[str]]:
    """Interface -> its addresses, the IPv4 one first; those without any are left out."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
            else:
                addresses.append(socket.inet_ntoa(answer[20:24]))
    if INET6.exists():
        for line in INET6.read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return {name: addresses for name, addresses in found.items() if addresses}
