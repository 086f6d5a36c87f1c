"""How the ranks of a heap come together: segments mapped, and the ways open by which each hears of all others."""

from __future__ import annotations

from typing import Any

import torch

from primus_odc.symmetric.board import Board
from primus_odc.symmetric.host import Exchange, HostMesh, connect_host_mesh
from primus_odc.symmetric.links import Card, Door, Links, Machines
from primus_odc.symmetric.liveness import PeerWatcher
from primus_odc.symmetric.words import WordLayout


def come_together(
    rank: int, names: list[str], nbytes: int, layout: WordLayout, exchange: Exchange, timeout_s: float, machines: Machines | None
) -> tuple[dict[int, torch.Tensor], Board, PeerWatcher]:
    """``(segments of this node by rank: uint8 [nbytes], board, watcher)``; collective, arguments as those of the heap.

    Raises:
        OdcError, PeerError, PeerTimeoutError: as :func:`connect_host_mesh` and :meth:`Door.connect`.
    """
    if machines is None:
        mesh, links = connect_host_mesh(rank, len(names), nbytes, exchange, timeout_s), None
    else:
        mesh, links = _on_machines(rank, names, nbytes, exchange, timeout_s, machines)
    segments = {r: torch.frombuffer(segment, dtype=torch.uint8) for r, segment in mesh.segments.items()}
    blocks = {r: s[: Board.nbytes(layout)] for r, s in segments.items()}
    board = Board(layout, blocks, rank, links.via if links is not None else ())
    return segments, board, PeerWatcher(mesh.sockets, board, links)


def _on_machines(
    rank: int, names: list[str], nbytes: int, exchange: Exchange, timeout_s: float, machines: Machines
) -> tuple[HostMesh, Links]:
    door = Door(machines.address)
    doors: list[Card] = []

    def with_doors(card: Any) -> list[Any]:
        # One exchange for both: what fails behind it is found within the time-out, whichever ranks it fails on.
        pairs = exchange((card, door.card))
        doors.extend(theirs for _, theirs in pairs)
        return [card for card, _ in pairs]

    try:
        mesh = connect_host_mesh(rank, len(names), nbytes, with_doors, timeout_s, machines.nodes)
    except BaseException:
        door.close()
        raise
    try:
        return mesh, door.connect(rank, names, machines.nodes, doors, timeout_s)
    except BaseException:
        for sock in mesh.sockets.values():
            sock.close()
        raise
