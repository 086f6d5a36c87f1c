"""Start-up between two hosts: network namespaces joined by a cable (veth), each with interfaces and addresses of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces; the interface of the first is called ``odc-a``, that of the second ``odc-b``."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2, for network namespaces")
    names = [f"odc-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "odc-a", "netns", names[0], "type", "veth", "peer", "name", "odc-b", "netns", names[1])
        for name, interface, address in zip(names, ("odc-a", "odc-b"), ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def test_start_up_between_two_hosts(hosts: list[str]) -> None:
    module = [sys.executable, "-m", "tests.symmetric.shmem.host_rank"]
    commands = [["ip", "netns", "exec", host, *module, str(rank), ADDRESSES[0], "odc-b"] for rank, host in enumerate(hosts)]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        first, second = (json.loads(rank.communicate(timeout=55)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    for start_up in ("both come", "rank 1 is slow"):
        assert (first[start_up], second[start_up]) == ("odc-a", "odc-b")
    for outcome in (first["an interface of host B alone"], second["an interface of host B alone"]):
        assert outcome.startswith("ConfigError") and "odc.interface: odc-b does not exist" in outcome and "odc-a 10.213.77.1" in outcome
    assert first["rank 1 is missing"] == "PeerTimeoutError: rank 0 on host A: arrived: rank 1 on host B did not get there in 3 s"
