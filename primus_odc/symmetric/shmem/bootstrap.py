"""Start-up of the library over the job's torch store: no MPI, no ``mpirun``, and nobody waits for ever.

Rank r of n, each step under the same time limit:

1. store ``arrived/r``, which names the machine; wait for all. So whoever is missing is known before a library blocks in its own start-up,
   while the store can still say who. With several machines the ways between them are tried (:mod:`primus_odc.symmetric.bootstrap`), and
   the library is told the interface that was found to lead there.
2. rank 0 makes the unique id and stores ``id``; the others wait for it.
3. start the library, in a thread of its own: its connections have no time limit that could be set from here, and MORI binds the thread that
   starts it to the CPUs of its GPU, which data loaders made later would inherit.
4. store ``started/r``; a rank whose library does not start in time names those that did not get here.

The library is started when the engine is attached, not before: the size of its heap follows from the model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from primus_odc.errors import OdcError
from primus_odc.symmetric.bootstrap import host_id, meet, store_address
from primus_odc.symmetric.gathering import Gathering


def start_library(
    extension: ModuleType,
    gathering: Gathering,
    interface: str | None,
    prepare: Callable[[int, str | None], None],
    prepare_thread: Callable[[], None],
) -> int:
    """Start the library of ``extension`` on all ranks (collective); the number of machines they run on.

    Args:
        extension: the native module.
        gathering: the ranks.
        interface: ``odc.interface``; None: between machines the one by which this rank reaches ``MASTER_ADDR``, else the library's choice.
        prepare: called with the number of machines and the interface before the library starts; sets its environment.
        prepare_thread: called in the thread that starts the library; makes this rank's GPU its current device.

    Raises:
        OdcError: something else in this process has started it already, or it fails.
        ConfigError: a rank's interface does not exist.
        PeerError: some machine does not reach another.
        PeerTimeoutError: a rank is missing.
    """
    if extension.initialized():
        raise OdcError(
            f"{gathering.names[gathering.rank]}: something else in this process has started the library already, so its heap has not the "
            "size this model needs; start it after primus_odc.attach, or not at all"
        )
    machines = len(set(gathering.exchange("arrived", host_id())))
    prepare(machines, _try_ways(gathering, interface) if machines > 1 else interface)
    unique_id = gathering.share("id", extension.unique_id)

    def start() -> None:
        prepare_thread()
        extension.init(gathering.rank, len(gathering.names), unique_id)

    gathering.together("started", start)
    if extension.rank() != gathering.rank:
        raise OdcError(f"{gathering.names[gathering.rank]}: the library calls this rank PE {extension.rank()}")
    return machines


def _try_ways(gathering: Gathering, interface: str | None) -> str:
    """Find the interface by which this rank reaches the others, see :func:`primus_odc.symmetric.bootstrap.meet`."""
    names, rank, timeout_s = gathering.names, gathering.rank, gathering.timeout_s
    places = meet(gathering.store, names, rank, interface=interface, store_address=store_address(), timeout_s=timeout_s)
    return places[rank].interface
