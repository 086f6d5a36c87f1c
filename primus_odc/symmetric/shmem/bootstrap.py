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

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType

from torch.distributed import PrefixStore, Store

from primus_odc.errors import OdcError, PeerTimeoutError
from primus_odc.symmetric.bootstrap import host_id, meet, store_address

_POLL_S = 0.02


class Gathering:
    """Ranks that meet at named points of one start-up.

    Args:
        store: the job's store, in a namespace of its own for this start-up (``PrefixStore``).
        rank: this rank.
        names: how each rank is called in messages.
        timeout_s: limit of every wait.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[str], timeout_s: float) -> None:
        self.rank = rank
        self.names = names
        self.timeout_s = timeout_s
        self._store = store

    def reach(self, point: str) -> None:
        """Say that this rank got to ``point``."""
        self._store.set(f"{point}/{self.rank}", "1")

    def missing(self, point: str) -> list[str]:
        """Names of the ranks that have not reached ``point``."""
        return [name for r, name in enumerate(self.names) if not self._store.check([f"{point}/{r}"])]

    def meet(self, point: str) -> None:
        """Reach ``point`` and wait for all; raises as :meth:`exchange`."""
        self.exchange(point, "1")

    def exchange(self, point: str, value: str) -> list[str]:
        """Reach ``point`` with a value; those of all ranks, in rank order.

        Raises:
            PeerTimeoutError: naming who did not come.
        """
        self._store.set(f"{point}/{self.rank}", value)
        self._until(lambda: not self.missing(point), lambda: f"{point}: {_some(self.missing(point))} did not get there")
        return [self._store.get(f"{point}/{r}").decode() for r in range(len(self.names))]

    def share(self, key: str, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on all ranks.

        Raises:
            PeerTimeoutError: rank 0 stored nothing.
        """
        if self.rank == 0:
            self._store.set(key, make().hex())
        self._until(lambda: self._store.check([key]), lambda: f"{key}: {self.names[0]} did not store it")
        return bytes.fromhex(self._store.get(key).decode())

    def together(self, point: str, call: Callable[[], None]) -> None:
        """Run ``call``, which waits for the other ranks, in a thread, and reach ``point`` when it has returned.

        Raises:
            PeerTimeoutError: it did not return; those who are not through either are named. The thread stays where it is.
            OdcError: it failed.
        """
        try:
            ended = ends_in_time(call, point, self.timeout_s)
        except Exception as error:
            raise OdcError(f"{self.names[self.rank]}: {point} failed: {error}") from error
        if not ended:
            raise PeerTimeoutError(
                f"{self.names[self.rank]}: {point}: not reached in {self.timeout_s:g} s; not there: {_some(self.missing(point))}. Do the "
                "network interface (odc.interface) and the network cards of these ranks reach each other?"
            )
        self.reach(point)

    def try_ways(self, interface: str | None) -> str:
        """Find the interface by which this rank reaches the others, see :func:`primus_odc.symmetric.bootstrap.meet`."""
        ways = PrefixStore("ways", self._store)
        places = meet(ways, self.names, self.rank, interface=interface, store_address=store_address(), timeout_s=self.timeout_s)
        return places[self.rank].interface

    def _until(self, done: Callable[[], bool], complaint: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"{self.names[self.rank]}: {complaint()} in {self.timeout_s:g} s")
            time.sleep(_POLL_S)


def ends_in_time(call: Callable[[], None], name: str, timeout_s: float) -> bool:
    """Run ``call``, which has no time limit of its own, in a thread; whether it returned in time. Else the thread stays where it is. What
    it raises is raised here."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            failures.append(error)

    thread = threading.Thread(target=body, name=f"primus_odc {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise failures[0]
    return not thread.is_alive()


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
    prepare(machines, gathering.try_ways(interface) if machines > 1 else interface)
    unique_id = gathering.share("id", extension.unique_id)

    def start() -> None:
        prepare_thread()
        extension.init(gathering.rank, len(gathering.names), unique_id)

    gathering.together("started", start)
    if extension.rank() != gathering.rank:
        raise OdcError(f"{gathering.names[gathering.rank]}: the library calls this rank PE {extension.rank()}")
    return machines


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "nobody"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
