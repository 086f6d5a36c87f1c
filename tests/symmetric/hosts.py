"""Two hosts for tests: network namespaces joined by a cable (veth), and processes that move into one of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("10.77.13.1", "10.77.13.2")
"""Of the two ends of the cable."""
_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """Run ``ip``.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(cables: tuple[str, str] = ("cable0", "cable0")) -> Iterator[list[str]]:
    """Their namespaces. Interfaces: ``cables`` join them; ``bridge0`` has one address in both; ``other0`` leads nowhere."""
    names = [f"odc{os.getpid()}{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        ip("-n", names[0], "link", "add", cables[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "link", "add", "bridge0", "type", "veth", "peer", "name", "nobody0")
            ip("-n", name, "link", "add", "other0", "type", "veth", "peer", "name", "nobody1")
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", cables[number])
            ip("-n", name, "address", "add", "172.31.255.1/24", "dev", "bridge0")
            ip("-n", name, "address", "add", f"10.88.{number}.1/24", "dev", "other0")
            for link in ("lo", cables[number], "bridge0", "nobody0", "other0", "nobody1"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def move_to(host: str) -> None:
    """Make the calling thread, and those it starts, see the interfaces of ``host``."""
    descriptor = os.open(f"/run/netns/{host}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
