"""Launches carry out what was asked: executed on arrays by the kernels' rules, against plain slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.symmetric.shmem.plan import ArenaMap, Launch, Read, Signal, Wait, Write, cut

NBYTES = 4096
WORDS = 3072
"""Data below, words from here on."""


class Job:
    """Arenas of all PEs at made-up addresses, those of each node mapped within it at other addresses, as mappings are."""

    def __init__(self, nodes: list[int], seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.arenas = [generator.integers(0, 256, NBYTES, dtype=np.uint8) for _ in nodes]
        for arena in self.arenas:
            arena[WORDS:] = 0
        own = [(pe + 1) << 32 for pe in range(len(nodes))]
        self.maps = []
        self.places: list[dict[int, int]] = []  # of each PE: address -> whose arena is mapped there
        for rank, node in enumerate(nodes):
            peers = [own[rank] if pe == rank else (own[rank] + (pe + 1 << 20) if nodes[pe] == node else 0) for pe in range(len(nodes))]
            self.maps.append(ArenaMap(rank, NBYTES, tuple(peers), batch=4))
            self.places.append({address: pe for pe, address in enumerate(peers) if address})

    def at(self, rank: int, address: int, nbytes: int) -> np.ndarray:
        for start, pe in self.places[rank].items():
            if start <= address and address + nbytes <= start + NBYTES:
                return self.arenas[pe][address - start : address - start + nbytes]
        raise AssertionError(f"PE {rank} touches {nbytes} bytes at {address:#x}, which nothing maps")

    def store(self, rank: int, pe: int, symmetric: int, peer: int, value: int) -> None:
        offset = symmetric - self.maps[rank].base
        word = self.at(rank, peer, 8) if peer else self.arenas[pe][offset : offset + 8]
        word[:] = np.frombuffer(np.uint64(value).tobytes(), np.uint8)

    def run(self, rank: int, launch: Launch, *, put: bool) -> None:
        assert 1 <= len(launch.transfers) <= 4
        assert launch.blocks >= 1 and launch.blocks * len(launch.transfers) <= 64
        for local, symmetric, peer, nbytes, signal, peer_signal, value, pe in launch.transfers:
            if nbytes:
                offset = symmetric - self.maps[rank].base
                there = self.at(rank, peer, nbytes) if peer else self.arenas[pe][offset : offset + nbytes]
                assert len(there) == nbytes
                here = self.at(rank, local, nbytes)
                if put:
                    there[:] = here
                else:
                    here[:] = there
            if signal:
                self.store(rank, pe, signal, peer_signal, value)


@st.composite
def operations(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, bool, list[Write]]]]:
    nodes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    pes = st.integers(0, len(nodes) - 1)
    rounds = []
    for turn in range(1, draw(st.integers(1, 4))):
        rank = draw(pes)
        items = []
        for k in range(draw(st.integers(0, 9))):
            # Disjoint destinations: concurrent transfers of one call may land in any order.
            nbytes = draw(st.integers(0, 100))
            there, here = 128 * k + draw(st.integers(0, 28)), 1536 + 128 * k + draw(st.integers(0, 28))
            signal = draw(st.none() | st.just(WORDS + 8 * k))
            items.append(Write(draw(pes), there, here, nbytes, signal, turn))
        rounds.append((rank, draw(st.booleans()), items))
    return nodes, rounds


@settings(max_examples=200)
@given(operations())
def test_random_operations_do_what_slices_do(case: tuple[list[int], list[tuple[int, bool, list[Write]]]]) -> None:
    nodes, rounds = case
    job = Job(nodes)
    expected = [arena.copy() for arena in job.arenas]
    for rank, put, items in rounds:
        base = job.maps[rank].base
        if put:
            launches = list(job.maps[rank].writes([item._replace(source=base + item.source) for item in items]))
        else:
            # A read into the places a write would take from: those do not overlap either.
            launches = list(job.maps[rank].reads([Read(i.pe, i.offset, base + i.source, i.nbytes) for i in items]))
        for launch in launches:
            job.run(rank, launch, put=put)
        before = [arena.copy() for arena in expected]
        for item in items:
            here, there = slice(item.source, item.source + item.nbytes), slice(item.offset, item.offset + item.nbytes)
            if put:
                expected[item.pe][there] = before[rank][here]
                if item.signal is not None:
                    expected[item.pe][item.signal : item.signal + 8] = np.frombuffer(np.uint64(item.value).tobytes(), np.uint8)
            else:
                expected[rank][here] = before[item.pe][there]
        for pe, arena in enumerate(job.arenas):
            np.testing.assert_array_equal(arena, expected[pe], err_msg=f"PE {pe}")


@settings(max_examples=200)
@given(st.integers(0, 200 << 20), st.integers(2, 31), st.integers(0, 1 << 40))
def test_a_cut_write_is_the_same_bytes_and_its_signal_comes_with_the_end(nbytes: int, parts: int, place: int) -> None:
    write = Write(3, place, 2 * place + 5, nbytes, 64, 9)
    *body, last = cut(write, parts)
    assert (last.signal, last.value) == (64, 9) and all(part.signal is None for part in body)
    assert len(body) <= parts and all(part.pe == 3 for part in (*body, last))
    at = 0
    for part in (*body, last):
        assert (part.offset, part.source) == (write.offset + at, write.source + at)
        at += part.nbytes
    assert at == nbytes
    assert (nbytes < 4 << 20) == (body == []) and (
        not body or (last.nbytes == 64 << 10 and min(p.nbytes for p in body[:-1] or body) >= 1 << 20)
    )


def test_each_pe_begins_with_another_peer() -> None:
    job = Job([0] * 5)
    firsts = []
    for rank, map_ in enumerate(job.maps):
        launches = list(map_.reads([Read(pe, 0, map_.base, 8) for pe in range(5)]))
        order = [transfer[-1] for launch in launches for transfer in launch.transfers]
        assert sorted(order) == list(range(5)) and order[-1] == rank
        firsts.append(order[0])
    assert sorted(firsts) == list(range(5))


def test_offsets_and_sizes_have_64_bits() -> None:
    huge = 5 << 40
    map_ = ArenaMap(0, huge, (1 << 45, 0))
    (launch,) = map_.reads([Read(1, huge - (3 << 32), (1 << 45) + 7, (3 << 32) - 1)])
    ((local, symmetric, peer, nbytes, *_),) = launch.transfers
    assert (local, symmetric, peer, nbytes) == ((1 << 45) + 7, (1 << 45) + huge - (3 << 32), 0, (3 << 32) - 1)


def test_words_reach_every_pe_of_a_large_job() -> None:
    map_ = ArenaMap(77, 4096, tuple((pe + 1) << 20 for pe in range(1000)))
    launches = list(map_.signals([Signal(pe, 64, 5) for pe in range(1000)]))
    assert all(len(launch.transfers) <= 32 for launch in launches)
    assert {(t[7], t[5], t[6]) for launch in launches for t in launch.transfers} == {(pe, ((pe + 1) << 20) + 64, 5) for pe in range(1000)}
    waits = [wait for batch in map_.waits([Wait(pe, 8 * (pe % 512), 3) for pe in range(1000)]) for wait in batch]
    assert waits == [(map_.base + 8 * (pe % 512), 3, pe) for pe in range(1000)]


def test_only_mapped_signals_need_a_kernel_of_their_own() -> None:
    map_ = ArenaMap(0, 4096, (1 << 20, 0, 2 << 20))
    far, near = Write(1, 0, 1 << 20, 8, 64, 1), Write(2, 0, 1 << 20, 8, 64, 1)
    assert [launch.signals_mapped for launch in map_.writes([far])] == [False]
    assert [launch.signals_mapped for launch in map_.writes([far, near])] == [True]
    assert [launch.signals_mapped for launch in map_.writes([near._replace(signal=None)])] == [False]


BASE = 1 << 20
WRONG = [
    ("reads", Read(2, 0, BASE, 8), "PEs 0 to 1"),
    ("reads", Read(-1, 0, BASE, 8), "PEs 0 to 1"),
    ("reads", Read(1, 4090, BASE, 8), "leaves the arena"),
    ("reads", Read(1, -8, BASE, 8), "leaves the arena"),
    ("reads", Read(1, 0, BASE, -1), "leaves the arena"),
    ("reads", Read(1, 0, BASE + 4089, 8), "this address lies outside"),
    ("writes", Write(1, 0, BASE - 1, 8), "this address lies outside"),
    ("writes", Write(1, 0, BASE, 8, 4, 1), "a multiple of 8"),
    ("writes", Write(1, 0, BASE, 8, 4096, 1), "a multiple of 8"),
    ("writes", Write(1, 0, BASE, 8, 8, -1), "from 0 to"),
    ("signals", Signal(1, 12, 1), "a multiple of 8"),
    ("signals", Signal(1, 8, 1 << 63), "from 0 to"),
    ("waits", Wait(3, 8, 1), "PEs 0 to 1"),
    ("waits", Wait(1, 4, 1), "a multiple of 8"),
]


@pytest.mark.parametrize(("operation", "item", "message"), WRONG)
def test_what_leaves_the_arena_is_refused(operation: str, item: object, message: str) -> None:
    map_ = ArenaMap(0, 4096, (BASE, 0))
    with pytest.raises(ValueError, match=message):
        list(getattr(map_, operation)([item]))
