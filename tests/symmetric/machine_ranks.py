"""Ranks on two machines that do what they are told: what the tests of a heap over several machines begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from primus_odc.errors import OdcError
from primus_odc.symmetric.arena import ArenaPlan
from primus_odc.symmetric.heap import SymmetricHeap
from primus_odc.symmetric.links import Machines
from tests.symmetric.far_memory import in_files
from tests.symmetric.harness import FileExchange, Ranks
from tests.symmetric.hosts import ADDRESSES, move_to, two_hosts

TWO_BY_TWO, TWO_AND_ONE = (0, 0, 1, 1), (0, 0, 1)
LONG_S = 60.0
"""A time-out that no test waits for: who fails earlier did not fail by it."""
OPERATION = "gather of group layers.3 (epoch 7)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts() as names:
        yield names


def _lives(rank: int, exchange: FileExchange, pipe: Connection, hosts: list[str], nodes: Sequence[int], folder: Path, *rest: Any) -> str:
    """A rank that does what it is told: ``(function, arguments)`` -> what it returned, or the type and text of an error."""
    timeout_s, misrouted, hides = rest
    move_to(hosts[nodes[rank]])
    plan = ArenaPlan()
    plan.add("data", 4096)
    heap = SymmetricHeap(
        rank,
        [f"rank {r}" for r in range(len(nodes))],
        plan,
        {"step": 1},
        exchange,
        timeout_s,
        in_files(folder, nodes, rank, exchange, misrouted.get(rank), hides=hides),
        far_words={"came": len(nodes), "number": 2},
        machines=Machines(nodes, ADDRESSES[nodes[rank]]),
    )
    pipe.send("ready")
    while (order := pipe.recv()) != "end":
        function, *arguments = order
        try:
            pipe.send(function(heap, *arguments))
        except OdcError as error:
            pipe.send((type(error).__name__, str(error)))
    return "ended"


class Machine:
    """The ranks of one test."""

    def __init__(
        self, hosts: list[str], folder: Path, nodes: Sequence[int], timeout_s: float, misrouted: dict[int, dict[int, int]], hides: bool
    ) -> None:
        self.nodes = nodes
        self.ranks = Ranks(len(nodes), folder, _lives, hosts, nodes, folder, timeout_s, misrouted, hides)

    def tell(self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any) -> None:
        self.ranks.tell((function, *arguments), *ranks)

    def ask(self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.tell(ranks, function, *arguments)
        return self.ranks.hear(*ranks)

    def others(self, rank: int) -> list[int]:
        return [r for r in range(len(self.nodes)) if r != rank]


Start = Callable[..., Machine]


@pytest.fixture
def start(hosts: list[str], tmp_path: Path) -> Iterator[Start]:
    started: list[Machine] = []

    def start_ranks(
        nodes: Sequence[int], timeout_s: float = LONG_S, misrouted: dict[int, dict[int, int]] | None = None, *, hides: bool = False
    ) -> Machine:
        machine = Machine(hosts, tmp_path, nodes, timeout_s, misrouted or {}, hides)
        started.append(machine)
        if misrouted is None:
            machine.ranks.expect("ready")
        return machine

    yield start_ranks
    for machine in started:
        machine.ranks.__exit__()


def send(heap: SymmetricHeap, to: int, epoch: int) -> str:
    """Put a pattern into the second half of a mate's or another node's data, and signal."""
    own = heap.view(heap.rank, heap.plan.regions["data"])
    own[:1024] = epoch
    heap.put(to, heap.plan.regions["data"], own[:1024], 1024 + 512 * heap.rank)
    heap.put_word(to, "number", -epoch, epoch % 2) if to not in heap.near else None
    heap.signal(to, "came", epoch, heap.rank)
    return "sent"
