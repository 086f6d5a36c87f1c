"""The library as it runs in this process: started once, with the same PEs for every memory that is made on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

from primus_odc.errors import OdcError
from primus_odc.symmetric.gathering import Gathering
from primus_odc.symmetric.shmem.bootstrap import start_library


class RunningLibrary:
    """A started library and the arenas in its heap.

    Arenas are numbered in the order in which they are made, which is the same on all PEs.
    """

    def __init__(self, extension: ModuleType, names: list[str], machines: int) -> None:
        self.extension = extension
        self.names = names
        self.machines = machines
        self._number = 0
        self._made: dict[int, Any] = {}
        self._closed: set[int] = set()

    def made(self, arena: Any) -> None:
        """``arena`` is the next one."""
        self._number += 1
        self._made[self._number] = arena

    def close(self, arena: Any) -> None:
        """This PE has no use for ``arena`` any more."""
        self._closed |= {number for number, known in self._made.items() if known is arena}

    def closed_everywhere(self, gathering: Gathering) -> list[Any]:
        """The arenas that all PEs have closed, in one order; forgotten here (collective)."""
        lists = gathering.exchange("closed arenas", json.dumps(sorted(self._closed)))
        numbers = sorted(set.intersection(*(set(json.loads(text)) for text in lists)))
        self._closed -= set(numbers)
        return [self._made.pop(number) for number in numbers]


_RUNNING: list[RunningLibrary] = []


def running_library(
    extension: ModuleType,
    gathering: Gathering,
    interface: str | None,
    prepare: Callable[[int, str | None], None],
    prepare_thread: Callable[[], None],
) -> tuple[RunningLibrary, bool]:
    """The library of ``extension``, started now unless it runs, and whether it was started now (collective); arguments and errors as
    :func:`start_library`.

    Raises:
        OdcError: it runs with other PEs, or on some of these ranks only.
    """
    me = gathering.names[gathering.rank]
    running = next((library for library in _RUNNING if library.extension is extension), None)
    states = gathering.exchange("library", "new" if running is None else json.dumps(running.names))
    if running is None and set(states) == {"new"}:
        machines = start_library(extension, gathering, interface, prepare, prepare_thread)
        running = RunningLibrary(extension, list(gathering.names), machines)
        _RUNNING.append(running)
        return running, True
    if running is None or states != [json.dumps(list(gathering.names))] * len(states):
        known = sorted({"not started" if state == "new" else ", ".join(json.loads(state)) for state in states})
        raise OdcError(
            f"{me}: the library serves one set of ranks in a process, and this model is on {', '.join(gathering.names)}, while it runs for "
            f"{' or '.join(known)}: train models on other ranks in a process of their own"
        )
    return running, False
