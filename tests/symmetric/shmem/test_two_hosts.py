"""Start-up between two hosts: network namespaces joined by a cable (veth), each with interfaces and addresses of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.symmetric.hosts import ADDRESSES, two_hosts

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with two_hosts(("odc-a", "odc-b")) as names:
        yield names


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
        assert outcome.startswith("ConfigError") and "odc.interface: odc-b does not exist" in outcome and "odc-a 10.77.13.1" in outcome
    missing = "PeerTimeoutError: rank 0 on host A: arrived: rank 1 on host B did not get there: see the output of rank 1 on host B. "
    assert first["rank 1 is missing"].startswith(missing + "The limit is 3 s (odc.timeout_s)")
