"""One rank of ``test_two_hosts.py``: start-ups over a store that stands on another host. Prints a JSON object, start-up -> outcome.

``python -m tests.symmetric.shmem.host_rank RANK ADDRESS_OF_RANK_0 INTERFACE_OF_RANK_1``
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed import PrefixStore, TCPStore

from primus_odc.errors import OdcError
from primus_odc.symmetric.gathering import Gathering
from primus_odc.symmetric.shmem.bootstrap import start_library
from primus_odc.symmetric.shmem.environment import prepare_environment

TIMEOUT_S = 3.0
PORT = 29500


def start_up(store: TCPStore, name: str, rank: int, interface: str | None) -> str:
    """The interface that the library was told, or what was raised."""
    library = SimpleNamespace(initialized=lambda: False, unique_id=lambda: b"id", init=lambda rank, ranks, id: None, rank=lambda: rank)
    gathering = Gathering(PrefixStore(name, store), rank, ["rank 0 on host A", "rank 1 on host B"], TIMEOUT_S)
    environment: dict[str, str] = {}
    try:
        start_library(cast(Any, library), gathering, interface, partial(_prepare, environment), lambda: None)
    except OdcError as error:
        return f"{type(error).__name__}: {error}"
    return environment["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"]


def _prepare(environment: dict[str, str], machines: int, interface: str | None) -> None:
    prepare_environment("nvshmem", arena_nbytes=1, pes=2, machines=machines, interface=interface, environment=environment)


def main() -> None:
    rank, address, interface = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    store = TCPStore(address, PORT, 2, rank == 0, timedelta(seconds=40))
    outcomes = {"both come": start_up(store, "both", rank, None)}
    if rank == 1:
        time.sleep(TIMEOUT_S / 2)
    outcomes["rank 1 is slow"] = start_up(store, "slow", rank, None)
    outcomes["an interface of host B alone"] = start_up(store, "interface", rank, interface)
    if rank == 0:
        outcomes["rank 1 is missing"] = start_up(store, "missing", rank, None)
    print(json.dumps(outcomes), flush=True)
    store.set(f"end/{rank}", "1")
    store.wait(["end/0", "end/1"], timedelta(seconds=40))
    time.sleep(0.5 if rank == 0 else 0)  # the store ends with rank 0
    os._exit(0)


if __name__ == "__main__":
    main()
