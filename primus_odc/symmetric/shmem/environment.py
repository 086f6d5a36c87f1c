"""Environment variables of MORI and NVSHMEM: what a job needs of them is set before the library starts, what breaks it is refused.

A variable the user set is never changed. If it fits, it stays; if it does not, the message says what it must be.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

from primus_odc.errors import ConfigError
from primus_odc.symmetric.shmem.extension import Library

MAX_MORI_PES = 128
"""MORI's area for device barriers has that many words; with more PEs its own barrier overwrites the heap."""

HEAP_SLACK_BYTES = 64 << 20
"""For what a library keeps in the heap itself."""

_NVSHMEM_OWN_BYTES = 256 << 20
_GRANULE, _GRANULE_BYTES = "NVSHMEM_CUMEM_GRANULARITY", 512 << 20

_FALSE = ("", "0", "false", "off", "no")
_MIB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
HEAP_SIZE: dict[str, str] = {"mori": "MORI_SHMEM_HEAP_SIZE", "nvshmem": "NVSHMEM_SYMMETRIC_SIZE"}
_INTERFACE = {"mori": "MORI_SOCKET_IFNAME", "nvshmem": "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"}


def prepare_environment(
    library: Library,
    *,
    arena_nbytes: int,
    pes: int,
    machines: int,
    interface: str | None,
    environment: MutableMapping[str, str],
) -> None:
    """Set what the library reads at its start.

    Args:
        library: which one.
        arena_nbytes: what will be allocated in its heap, in bytes.
        pes: ranks of the job.
        machines: how many they run on.
        interface: network interface for the start-up's own connections (``odc.interface``); None: the library's choice.
        environment: read and changed; ``os.environ``.

    Raises:
        ConfigError: with every setting that cannot work, and what to set instead.
    """
    problems = [*_mori_problems(environment, pes)] if library == "mori" else [*_nvshmem_problems(environment, machines)]
    wanted = {HEAP_SIZE[library]: str(heap_nbytes(arena_nbytes))}
    if interface is not None:
        wanted[_INTERFACE[library]] = interface
        present = [name for _, name in socket.if_nameindex()]
        if interface not in present:
            problems.append(f"odc.interface: {interface} is no network interface of this machine; there are {', '.join(present)}")
    if library == "nvshmem":
        wanted["NVSHMEM_DISABLE_NVLS"] = "1"  # multicast is for its collectives, which nobody calls, and not every machine allows it
        wanted["NVSHMEM_DISABLE_NCCL"] = "1"  # likewise, and a communicator of its own takes 1.7 GiB of every GPU (measured on H200)
    if library == "nvshmem" and machines > 1:
        wanted["NVSHMEM_IB_ENABLE_IBGDA"] = "1"  # else a thread of the host would post every request
    for name, value in wanted.items():
        users = environment.get(name)
        if users is None:
            continue
        if name == HEAP_SIZE[library]:
            size = parse_size(users)
            if size is None or size < int(value):
                problems.append(f"{name}={users}: this model needs {value}; unset it, it is then set to what is needed")
        elif name == _INTERFACE[library] and users != value:
            problems.append(f"{name}={users}, but this rank is to use {value}: unset it, or set odc.interface: {users}")
    if problems:
        raise ConfigError(problems)
    for name, value in wanted.items():
        environment.setdefault(name, value)


def heap_overhead(library: Library, arena_nbytes: int, environment: Mapping[str, str]) -> int:
    """Bytes of a GPU that the library's heap takes beside ``arena_nbytes``: what the library keeps there itself, and rounding. For a first
    arena; a later one of the same process shares it.

    MORI allocates the heap once. NVSHMEM's grows by whole granules, and it needs about 256 MiB for itself.
    """
    if library == "mori":
        return (parse_size(environment.get(HEAP_SIZE["mori"], "")) or heap_nbytes(arena_nbytes)) - arena_nbytes
    granule = parse_size(environment.get(_GRANULE, "")) or _GRANULE_BYTES
    return -(-(_NVSHMEM_OWN_BYTES + arena_nbytes) // granule) * granule - arena_nbytes


def heap_nbytes(arena_nbytes: int) -> int:
    """Bytes of the library's heap for an arena of this size: with slack, in whole MiB."""
    return -(-(arena_nbytes + HEAP_SLACK_BYTES) // _MIB) * _MIB


def parse_size(text: str) -> int | None:
    """``"4G"``, ``"512M"`` or ``"1073741824"`` in bytes; None: not such a text."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        return None
    return int(number) * _UNITS[unit]


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() not in _FALSE


def _mori_problems(environment: Mapping[str, str], pes: int) -> list[str]:
    problems = []
    if _on(environment, "MORI_ENABLE_SDMA"):
        problems.append("MORI_ENABLE_SDMA: puts and signals of MORI do nothing then; unset it")
    if _on(environment, "MORI_ENABLE_HOST_PROXY"):
        problems.append("MORI_ENABLE_HOST_PROXY: MORI has no reads and no puts by address then; unset it")
    if _on(environment, "MORI_ENABLE_RAIL_ONLY"):
        problems.append("MORI_ENABLE_RAIL_ONLY: most pairs of ranks have no connection then; unset it")
    mode = environment.get("MORI_SHMEM_MODE", "static_heap")
    if mode != "static_heap":
        problems.append(f"MORI_SHMEM_MODE={mode}: only static_heap tells which peers are mapped; unset it")
    kind = environment.get("MORI_SHMEM_HEAP_TYPE", "uncached")
    if kind != "uncached":
        problems.append(f"MORI_SHMEM_HEAP_TYPE={kind}: a cached heap may show old data after a network card wrote to it; unset it")
    if pes > MAX_MORI_PES:
        problems.append(f"{pes} ranks: MORI is served up to {MAX_MORI_PES} (its own barrier area ends there)")
    return problems


def _nvshmem_problems(environment: Mapping[str, str], machines: int) -> list[str]:
    name = "NVSHMEM_IB_ENABLE_IBGDA"
    if machines > 1 and name in environment and not _on(environment, name):
        return [f"{name}={environment[name]}: the GPUs post their own requests between machines; unset it"]
    return []
