"""One rank of the tests of the kernels: what each kernel did, against slices and sums of plain torch and numpy."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from primus_odc.errors import PeerTimeoutError, VerificationError
from primus_odc.symmetric.shmem.memory import ShmemMemory
from primus_odc.symmetric.shmem.plan import Read, Signal, Wait, Write
from tests.gpu.models import SHMEM

MIB = 1 << 20
GUARD = 0xA5
TIMEOUT_S = 60.0


def open_memory(rank: int, world_size: int, folder: str, layout: str, nbytes: int) -> ShmemMemory:
    """``layout``: ``mapped``, all ranks are of one node; ``network``, each is a node of its own, so that every transfer to a peer goes
    through the library."""
    store = dist.PrefixStore("shmem", dist.FileStore(f"{folder}/shmem", world_size))
    nodes = [0] * world_size if layout == "mapped" else list(range(world_size))
    names = [f"rank {r}" for r in range(world_size)]
    device = torch.device("cuda", torch.cuda.current_device())
    return ShmemMemory(SHMEM, nbytes, rank, names, nodes, store, device, timeout_s=TIMEOUT_S)


def content(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes that differ between seeds and places, made on the GPU."""
    out = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    for first in range(0, nbytes, 64 * MIB):
        i = torch.arange(first, min(first + 64 * MIB, nbytes), dtype=torch.int64, device="cuda")
        out[first : first + len(i)] = ((i * 2654435761 + seed * 40503) >> 13).to(torch.uint8)
    return out


def meet() -> None:
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # of the hosts, by gloo


def transfers(rank: int, world_size: int, folder: str, layout: str, sizes: list[int], shifts: list[tuple[int, int]]) -> list[str]:
    """Every rank reads from and writes to every rank, itself included; returns what differed."""
    slot = max(sizes) + 256
    memory = open_memory(rank, world_size, folder, layout, (world_size + 1) * slot + 4096)
    data, inbox = memory.arena[:slot], memory.arena[slot : (world_size + 1) * slot]
    words = (world_size + 1) * slot + -((world_size + 1) * slot) % 8
    wrong = []
    turn = 0
    for nbytes in sizes:
        for here, there in shifts:
            turn += 1
            data[there : there + nbytes] = content(rank + 100 * turn, nbytes)
            inbox.fill_(GUARD)
            meet()
            base = memory.map.base + slot + here
            memory.get([Read(pe, there, base + pe * slot, nbytes) for pe in range(world_size)])
            memory.synchronize("get")
            wrong += compare(inbox, slot, here, nbytes, world_size, 100 * turn, f"get {nbytes} {here} {there}")
            meet()

            inbox.fill_(GUARD)
            data[there : there + nbytes] = content(rank + 100 * turn + 50, nbytes)
            meet()
            source = memory.map.base + there
            to = slot + rank * slot + here
            memory.put([Write(pe, to, source, nbytes, words + 8 * rank, turn) for pe in range(world_size)])
            memory.wait([Wait(pe, words + 8 * pe, turn) for pe in range(world_size)])
            memory.synchronize("put")
            wrong += compare(inbox, slot, here, nbytes, world_size, 100 * turn + 50, f"put {nbytes} {here} {there}")
            if memory.words(words, world_size).tolist() != [turn] * world_size:
                wrong.append(f"words {memory.words(words, world_size).tolist()} after turn {turn}")
            meet()
    memory.close()
    return wrong


def compare(inbox: torch.Tensor, slot: int, shift: int, nbytes: int, count: int, seed: int, what: str) -> list[str]:
    wrong = []
    for pe in range(count):
        part = inbox[pe * slot : (pe + 1) * slot]
        if not torch.equal(part[shift : shift + nbytes], content(seed + pe, nbytes)):
            wrong.append(f"{what}: data of {pe}")
        edges = torch.cat([part[:shift], part[shift + nbytes : shift + nbytes + 64]])
        if not bool((edges == GUARD).all()):
            wrong.append(f"{what}: bytes around the data of {pe}")
    return wrong


def sums(rank: int, world_size: int, folder: str, sizes: list[int]) -> list[str]:
    """Sums of every rank's slices, read through mapped memory, bit for bit those of torch in the same order."""
    slot = 8 * max(sizes) + 64
    memory = open_memory(rank, world_size, folder, "mapped", slot)
    arenas = [memory.peer(pe) for pe in range(world_size)]
    wrong = []
    for dtype in (torch.float32, torch.float64):
        for size in sizes:
            for shift in (0, dtype.itemsize):
                region = slice(shift, shift + size * dtype.itemsize)
                own = torch.Generator("cuda").manual_seed(size + rank)
                memory.arena[region].view(dtype).copy_(torch.randn(size, generator=own, dtype=dtype, device="cuda"))
                meet()
                views = [arena[region].view(dtype) for arena in arenas if arena is not None]
                for order in ([*range(world_size)], [world_size - 1], [], [k * 7 % world_size for k in range(67 if size < MIB else 3)]):
                    out = torch.full((size,), float("nan"), dtype=dtype, device="cuda")
                    memory.reduce(out, [views[s] for s in order])
                    memory.synchronize("reduce")
                    expected = torch.zeros(size, dtype=dtype, device="cuda")
                    for s in order:
                        expected += views[s]
                    if not torch.equal(out, expected):
                        wrong.append(f"{dtype} {size} shift {shift} order {order[:5]} of {len(order)}")
                meet()
    memory.close()
    return wrong


SEQUENCE_BYTES = 1 << 16
_FLOATS = 3 << 14
"""The last quarter of a sequence's arena holds numbers; only sums write there."""


def sequence(rank: int, world_size: int, folder: str, layout: str, seed: int, count: int) -> list[str]:
    """``count`` random operations of all ranks in one order, which signals and waits in the streams alone keep: no host waits in between.

    Every operation may overlap any earlier one. The reference runs the same list on numpy arrays.
    """
    words = SEQUENCE_BYTES
    memory = open_memory(rank, world_size, folder, layout, SEQUENCE_BYTES + 8 * world_size)
    arenas = [np.random.default_rng([seed, pe]).integers(0, 256, SEQUENCE_BYTES, dtype=np.uint8) for pe in range(world_size)]
    for pe, arena in enumerate(arenas):
        arena[_FLOATS:].view(np.float32)[:] = np.random.default_rng([seed, pe, 1]).standard_normal((SEQUENCE_BYTES - _FLOATS) // 4)
    memory.arena[:SEQUENCE_BYTES].copy_(torch.from_numpy(arenas[rank]))
    meet()
    draw = random.Random(seed)
    actors = [draw.randrange(world_size) for _ in range(count + 1)]
    peers = [memory.peer(pe) for pe in range(world_size)]
    for k in range(count):
        me, mine = actors[k], actors[k] == rank
        if mine and k:
            memory.wait([Wait(actors[k - 1], words + 8 * actors[k - 1], k)])
        kind = draw.choice(("get", "put", "put and signal", "reduce"))
        told = False
        if kind == "reduce":
            _reduce(memory, draw, arenas, peers, me, mine, layout)
        else:
            pe, nbytes = draw.randrange(world_size), draw.choice((0, 1, 3, draw.randrange(64), draw.randrange(9000)))
            here, there = draw.randrange(_FLOATS - nbytes), draw.randrange(_FLOATS - nbytes)
            while pe == me and abs(here - there) < nbytes:  # a copy onto itself has no order of its own
                here, there = draw.randrange(_FLOATS - nbytes), draw.randrange(_FLOATS - nbytes)
            source, target = (arenas[pe][there : there + nbytes], arenas[me][here : here + nbytes])
            if kind == "get":
                target[:] = source
                if mine:
                    memory.get([Read(pe, there, memory.map.base + here, nbytes)])
            else:
                source[:] = target
                told = kind == "put and signal" and actors[k + 1] == pe
                if mine:
                    signal = words + 8 * rank if told else None
                    memory.put([Write(pe, there, memory.map.base + here, nbytes, signal, k + 1)])
        if mine and not told:
            memory.signal([Signal(actors[k + 1], words + 8 * rank, k + 1)])
    memory.synchronize("sequence")
    meet()
    found = memory.arena[:SEQUENCE_BYTES].cpu().numpy()
    memory.close()
    return [f"{int((found != arenas[rank]).sum())} bytes of rank {rank} differ"] if not np.array_equal(found, arenas[rank]) else []


def _reduce(memory: ShmemMemory, draw: random.Random, arenas: list[np.ndarray], peers: list[Any], me: int, mine: bool, layout: str) -> None:
    """One sum into the actor's numbers: of its own and, where they are mapped, its peers'."""
    total = (SEQUENCE_BYTES - _FLOATS) // 4
    size = draw.randrange(1, total // 4)
    out = draw.randrange(total // 2 - size)  # sums go to the first half, addends come from the second
    picks = [
        (draw.randrange(len(arenas)) if layout == "mapped" else me, total // 2 + draw.randrange(total // 2 - size))
        for _ in range(draw.randrange(5))
    ]
    result = np.zeros(size, np.float32)
    for pe, first in picks:
        result += arenas[pe][_FLOATS:].view(np.float32)[first : first + size]
    arenas[me][_FLOATS:].view(np.float32)[out : out + size] = result
    if mine:
        views = [peers[pe][_FLOATS:SEQUENCE_BYTES].view(torch.float32)[first : first + size] for pe, first in picks]
        memory.reduce(peers[me][_FLOATS:SEQUENCE_BYTES].view(torch.float32)[out : out + size], views)


def a_little_of_each(rank: int, world_size: int, folder: str, layout: str) -> list[str]:
    """Small transfers, sums where memory is mapped, and a short sequence, one after the other in the same processes."""
    folders = [f"{folder}/{name}" for name in ("transfers", "sums", "sequence")]
    for name in folders:
        os.makedirs(name, exist_ok=True)
    wrong = transfers(rank, world_size, folders[0], layout, [1, 17, 4099], [(0, 0), (1, 0)])
    if layout == "mapped":
        wrong += sums(rank, world_size, folders[1], [1, 2, 3, 4, 5, 1023, 4096, 4099])
    return wrong + sequence(rank, world_size, folders[2], layout, 11, 60)


def failures(rank: int, world_size: int, folder: str) -> list[str]:
    """A word that never comes, on rank 0, and a wrong pattern, on the others: told with a name, and nothing later happens."""
    memory = open_memory(rank, world_size, folder, "mapped", 4096)
    wrong = []
    peer = (rank + 1) % world_size
    meet()
    try:
        if rank == 0:
            memory.wait([Wait(peer, 64, 7)], timeout_s=0.2)
        else:
            memory._arena.check_pattern(memory.map.base, 100, 5, peer, torch.cuda.current_stream().cuda_stream)
        memory.put([Write(peer, 128, memory.map.base, 8, 256, 1)])
        memory.synchronize("the test")
        wrong.append("nothing was raised")
    except PeerTimeoutError as error:
        wrong += [] if f"rank 0: the test: rank {peer} did not store 7 in time" in str(error) and "it is 0" in str(error) else [str(error)]
    except VerificationError as error:
        wrong += [] if f"rank {rank}: the test: pattern test with rank {peer}" in str(error) else [str(error)]
    meet()
    if memory.words(256, 1).tolist() != [0]:
        wrong.append("a signal was stored after a failure")
    return wrong
