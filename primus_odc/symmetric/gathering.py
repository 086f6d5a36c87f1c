"""Ranks gather values over the job's torch store: whoever does not come is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from primus_odc.errors import OdcError, PeerTimeoutError

_POLL_S = 0.02


class Store(Protocol):
    """The part of :class:`torch.distributed.Store` that is used; :meth:`get` is called for keys that are there only."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


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
        self.store = store

    def reach(self, point: str, value: str = "1") -> None:
        """Say that this rank got to ``point``, and with what."""
        self.store.set(f"{point}/{self.rank}", value)

    def missing(self, point: str) -> list[str]:
        """Names of the ranks that have not reached ``point``."""
        return [name for r, name in enumerate(self.names) if not self.store.check([f"{point}/{r}"])]

    def meet(self, point: str) -> None:
        """Reach ``point`` and wait for all; raises as :meth:`exchange`."""
        self.exchange(point, "1")

    def exchange(
        self, point: str, value: str, look: Callable[[int, str], None] = lambda rank, value: None, more_s: float = 0.0
    ) -> list[str]:
        """Reach ``point`` with a value; those of all ranks, in rank order.

        Args:
            look: called with every rank and its value as it comes; what it raises ends the wait for the others.
            more_s: seconds for what ranks do before they come, beside the time limit.

        Raises:
            PeerTimeoutError: naming who did not come.
        """
        self.reach(point, value)
        values: dict[int, str] = {}

        def awaited() -> list[int]:
            return [r for r in range(len(self.names)) if r not in values]

        def all_came() -> bool:
            for r in awaited():
                if self.store.check([f"{point}/{r}"]):
                    values[r] = self.store.get(f"{point}/{r}").decode()
                    look(r, values[r])
            return not awaited()

        def complaint() -> str:
            who = _some([self.names[r] for r in awaited()])
            return f"{point}: {who} did not get there: see the output of {who}"

        self._until(all_came, complaint, more_s)
        return [values[r] for r in range(len(self.names))]

    def share(self, key: str, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on all ranks.

        Raises:
            PeerTimeoutError: rank 0 stored nothing.
        """
        if self.rank == 0:
            self.store.set(key, make().hex())
        self._until(lambda: self.store.check([key]), lambda: f"{key}: {self.names[0]} did not store it")
        return bytes.fromhex(self.store.get(key).decode())

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

    def _until(self, done: Callable[[], bool], complaint: Callable[[], str], more_s: float = 0.0) -> None:
        deadline = time.monotonic() + self.timeout_s + more_s
        while not done():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"{self.names[self.rank]}: {complaint()}. The limit is {self.timeout_s:g} s (odc.timeout_s); a rank that is only slow "
                    "to start needs a larger one"
                )
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


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "nobody"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
