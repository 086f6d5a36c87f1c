"""What the libraries' variables become, and which are refused."""

from __future__ import annotations

import socket

import pytest

from primus_odc.errors import ConfigError
from primus_odc.symmetric.shmem.environment import heap_nbytes, heap_overhead, parse_size, prepare_environment
from primus_odc.symmetric.shmem.extension import Library

GIB = 1 << 30


def prepare(
    library: Library, environment: dict[str, str], *, pes: int = 16, machines: int = 2, interface: str | None = None
) -> dict[str, str]:
    prepare_environment(library, arena_nbytes=GIB, pes=pes, machines=machines, interface=interface, environment=environment)
    return environment


def problems(library: Library, environment: dict[str, str], *, pes: int = 16, machines: int = 2, interface: str | None = None) -> str:
    before = dict(environment)
    with pytest.raises(ConfigError) as caught:
        prepare(library, environment, pes=pes, machines=machines, interface=interface)
    assert environment == before
    return "\n".join(caught.value.problems)


def test_the_heap_is_as_large_as_the_arena_needs() -> None:
    assert GIB < heap_nbytes(GIB) < GIB + (1 << 28) and heap_nbytes(GIB + 1) % (1 << 20) == 0
    assert prepare("mori", {}) == {"MORI_SHMEM_HEAP_SIZE": str(heap_nbytes(GIB))}
    off = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_DISABLE_NCCL": "1"}
    nvshmem = {"NVSHMEM_SYMMETRIC_SIZE": str(heap_nbytes(GIB)), "NVSHMEM_IB_ENABLE_IBGDA": "1", **off}
    assert prepare("nvshmem", {}) == nvshmem
    assert prepare("nvshmem", {"NVSHMEM_DISABLE_NVLS": "0"})["NVSHMEM_DISABLE_NVLS"] == "0"
    assert "NVSHMEM_IB_ENABLE_IBGDA" not in prepare("nvshmem", {}, machines=1)


@pytest.mark.parametrize("library, name", [("mori", "MORI_SHMEM_HEAP_SIZE"), ("nvshmem", "NVSHMEM_SYMMETRIC_SIZE")])
def test_a_heap_size_of_the_users_stays_or_is_refused(library: Library, name: str) -> None:
    assert prepare(library, {name: "4G"})[name] == "4G"
    for small in ("1G", str(GIB), "plenty"):
        told = problems(library, {name: small})
        assert f"{name}={small}" in told and str(heap_nbytes(GIB)) in told


def test_sizes() -> None:
    texts = ["4G", "512m", "1k", "1073741824", "", "G", "1.5G", "4GB", "-1"]
    assert [parse_size(text) for text in texts] == [4 << 30, 512 << 20, 1024, GIB, None, None, None, None, None]


@pytest.mark.parametrize(
    "name, bad, good",
    [
        ("MORI_ENABLE_SDMA", "1", "0"),
        ("MORI_ENABLE_HOST_PROXY", "true", "off"),
        ("MORI_ENABLE_RAIL_ONLY", "1", ""),
        ("MORI_SHMEM_MODE", "vmm_heap", "static_heap"),
        ("MORI_SHMEM_MODE", "static", "static_heap"),
        ("MORI_SHMEM_HEAP_TYPE", "normal", "uncached"),
    ],
)
def test_settings_under_which_mori_loses_data_are_refused(name: str, bad: str, good: str) -> None:
    assert name in problems("mori", {name: bad})
    assert prepare("mori", {name: good})[name] == good
    assert prepare("nvshmem", {name: bad})[name] == bad  # not read by it


def test_mori_serves_as_many_pes_as_its_barrier_area_has_words() -> None:
    prepare("mori", {}, pes=128)
    assert "129 ranks" in problems("mori", {}, pes=129)
    prepare("nvshmem", {}, pes=1024)


def test_all_problems_are_told_at_once() -> None:
    told = problems("mori", {"MORI_ENABLE_SDMA": "1", "MORI_SHMEM_HEAP_SIZE": "1M"}, pes=200)
    assert len(told.splitlines()) == 3


@pytest.mark.parametrize("library, name", [("mori", "MORI_SOCKET_IFNAME"), ("nvshmem", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")])
def test_an_interface_is_named_once(library: Library, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1")])
    assert prepare(library, {}, interface="eth1")[name] == "eth1"
    assert prepare(library, {name: "eth1"}, interface="eth1")[name] == "eth1"
    assert prepare(library, {name: "eth0"})[name] == "eth0"
    told = problems(library, {name: "eth0"}, interface="eth1")
    assert "eth0" in told and "eth1" in told
    assert "ib7 is no network interface of this machine; there are lo, eth1" in problems(library, {}, interface="ib7")


def test_a_host_thread_that_posts_for_the_gpu_is_refused_between_nodes() -> None:
    assert "NVSHMEM_IB_ENABLE_IBGDA=0" in problems("nvshmem", {"NVSHMEM_IB_ENABLE_IBGDA": "0"})
    assert prepare("nvshmem", {"NVSHMEM_IB_ENABLE_IBGDA": "0"}, machines=1)["NVSHMEM_IB_ENABLE_IBGDA"] == "0"


def test_what_a_heap_takes_beside_the_arena() -> None:
    mib = 1 << 20
    assert heap_overhead("mori", 100 * mib, {}) == heap_nbytes(100 * mib) - 100 * mib
    assert heap_overhead("mori", 100 * mib, {"MORI_SHMEM_HEAP_SIZE": "1G"}) == 924 * mib
    # NVSHMEM: 256 MiB for itself, in granules of 512.
    assert [heap_overhead("nvshmem", n * mib, {}) for n in (1, 256, 257, 768)] == [511 * mib, 256 * mib, 767 * mib, 256 * mib]
    assert heap_overhead("nvshmem", 100 * mib, {"NVSHMEM_CUMEM_GRANULARITY": "2M"}) == 256 * mib
