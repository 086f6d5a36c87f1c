"""SymmetricHeap: one arena and one block of control words per rank, readable and writable by every peer of its node.

The words lie in host memory always. The arena lies beside them, or in device memory; then words that cover device work are stored by the
stream that does it (:meth:`SymmetricHeap.store`).

Over several machines (:class:`Machines`) the arenas and words of the own node are mapped as always. Memory of other nodes is written
only, through a :class:`Network`: arenas by :meth:`SymmetricHeap.put`, and *far words* by :meth:`SymmetricHeap.signal`, which lie where the
network can write (:mod:`primus_odc.symmetric.far_words`). Who lives there comes over TCP (:mod:`primus_odc.symmetric.links`).

The heap knows nothing of parameters or gradients. It offers byte views of arenas, the control words, and the only blocking call of the
library, :meth:`SymmetricHeap.wait`, which ends with an error that names the peer when the peer died, left, aborted or fell silent.

Start-up ends with a test of every pair of ranks (:mod:`primus_odc.symmetric.pattern`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from primus_odc.errors import PeerError, PeerTimeoutError, ProtocolError
from primus_odc.symmetric import pattern
from primus_odc.symmetric.arena import ArenaPlan, Region
from primus_odc.symmetric.board import OWN_WORDS, Board
from primus_odc.symmetric.far_words import FarWords
from primus_odc.symmetric.host import Exchange
from primus_odc.symmetric.links import Machines
from primus_odc.symmetric.liveness import PeerWatcher
from primus_odc.symmetric.network import Network
from primus_odc.symmetric.presence import come_together
from primus_odc.symmetric.pulse import HARD_CAP_FACTOR, Pulse
from primus_odc.symmetric.relay import Relay
from primus_odc.symmetric.words import WORD_BYTES, WordLayout

_SHOWN = "shown"
"""Words of a heap over several machines: this rank's far words, where only it looks at them itself."""
_SPIN_ROUNDS = 20
_MAX_SLEEP_S = 0.001
_MAX_SLEEP_DEVICE_S = 0.00005
"""Beside a device a host has nothing else to do, and what it waits for is on the critical path."""
_IN_FLIGHT_S = 1.0
"""What a rank of another node stored before it left, and its goodbye, come by different ways in any order, so far apart at most."""


class Memory(Protocol):
    """Arenas outside the host's segments (:class:`primus_odc.symmetric.symm_mem.DeviceMemory`)."""

    @property
    def arenas(self) -> Mapping[int, torch.Tensor]:
        """Those of the ranks of this node, uint8 ``[nbytes]``."""

    @property
    def network(self) -> Network | None:
        """What writes into other nodes; None: there are none."""

    def store(self, rank: int, offset: int, value: int) -> None:
        """Store a word, ``offset`` bytes into the block of ``rank``, behind what the current stream was given."""

    def synchronize(self) -> None:
        """Wait for this device's own work; what it put and signalled to other nodes has arrived there then."""

    def close(self) -> None:
        """As :meth:`synchronize`, and end; this rank says goodbye afterwards."""


MakeMemory = Callable[[int, Mapping[int, torch.Tensor], int], Memory]
"""``(arena bytes, words of every rank of the node as bytes, number of far words)`` -> memory; collective over all ranks."""


def _leave(watcher: PeerWatcher) -> None:
    """End a heap that was dropped or whose script simply ended: its words and memory stay readable for slower ranks.

    After an uncaught exception (``sys.last_type``) no goodbye is said, so that the peers see a death at once.
    """
    watcher.stop(goodbye=getattr(sys, "last_type", None) is None)


class SymmetricHeap:
    """The arenas and words of all ranks of one job, seen from one of them.

    Args:
        rank: this process's index among the ranks sharing the heap, ``0 <= rank < world_size``.
        names: how each rank is called in messages (its global rank); ``len(names)`` is the number of ranks.
        plan: the arena's regions, equal on all ranks.
        words: further control words ``{name: count}`` beside the heap's own, equal on all ranks.
        exchange: all-gather of one object over those ranks in rank order (collective; used during construction only).
        timeout_s: a wait fails when its peer shows no heartbeat for this long, or in any case after
            :data:`HARD_CAP_FACTOR` times as long.
        make_memory: puts the arenas into device memory; None: host memory.
        far_words: words that ranks of other nodes store, as ``words``. Without ``machines`` they lie beside those.
        machines: which ranks share a machine, where not all do; needs ``make_memory``, and a ``network`` of what it makes.

    Attributes:
        near: the ranks of this node, ascending.
        sends: entered by :meth:`sending`; who has a stream for what is sent makes it the current one.
        signals: how often :meth:`signal` was called.
        waited_s: seconds in :meth:`wait` by the first word of the operation.

    Raises:
        OdcError, PeerError, PeerTimeoutError: the ranks cannot share memory, or one of them did not come.
    """

    def __init__(
        self,
        rank: int,
        names: list[str],
        plan: ArenaPlan,
        words: Mapping[str, int],
        exchange: Exchange,
        timeout_s: float,
        make_memory: MakeMemory | None = None,
        *,
        far_words: Mapping[str, int] | None = None,
        machines: Machines | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = len(names)
        self.names = names
        self.timeout_s = timeout_s
        self.plan = plan
        self.waited_s: dict[str, float] = {}
        self.sends: Callable[[], AbstractContextManager[None]] = nullcontext
        self._collecting = False
        plan.add(pattern.PROBE, pattern.probe_bytes(self.world_size))
        far_layout = WordLayout.of({pattern.FAR_WORD: self.world_size, **(far_words or {})})
        beside = (far_words or {}) if machines is None else {_SHOWN: far_layout.total}
        layout = WordLayout.of({**OWN_WORDS, **words, **beside})
        self._data = Board.nbytes(layout)
        nbytes = self._data + (max(plan.nbytes, 1) if make_memory is None else 0)
        segments, self._board, self._watcher = come_together(rank, names, nbytes, layout, exchange, timeout_s, machines)
        weakref.finalize(self, _leave, self._watcher)  # also at interpreter exit
        self.words = self._board.words
        self.near = self._board.near
        self._memory: Memory | None = None
        self._far: FarWords | None = None
        self._relay: Relay | None = None
        self._stored: dict[tuple[int, int], int] = {}
        try:
            if make_memory is None:
                self._arenas: Mapping[int, torch.Tensor] = {r: s[self._data :] for r, s in segments.items()}
            else:
                blocks = {r: s[: layout.nbytes] for r, s in segments.items()}
                self._memory = make_memory(max(plan.nbytes, 1), blocks, far_layout.total if machines is not None else 0)
                self._arenas = self._memory.arenas
            self._network = self._memory.network if self._memory is not None else None
            if machines is not None:
                if self._network is None:
                    raise ValueError("ranks of several machines need memory with a network (make_memory)")
                self._far = FarWords(far_layout, self._network, self._look_of(self._network), names[rank])
            self._max_sleep_s = _MAX_SLEEP_S if self.device.type == "cpu" else _MAX_SLEEP_DEVICE_S
            self.signals = 0
            pattern.check_mapping(self)
            self.signals = 0
        except BaseException as error:
            self.abort(str(error))
            self.close(goodbye=False)
            raise

    def _look_of(self, network: Network) -> Callable[[int], npt.NDArray[np.int64]]:
        """How this rank looks at far words of its node; starts to show its own where others may not look at them."""
        if network.mates_look:
            return network.far_words
        words, mine = self.words, self.words.block(self.rank, _SHOWN)
        self._relay = Relay(network, self.rank, partial(np.copyto, mine), self._board.abort, self.timeout_s)
        return lambda home: words.block(home, _SHOWN).copy()

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return self._arenas[self.rank].device

    @property
    def arena_nbytes(self) -> int:
        """Bytes this rank shares: regions, words and abort text."""
        return self._data + self.plan.nbytes

    def view(self, rank: int, region: Region) -> torch.Tensor:
        """The bytes of ``region`` in the arena of ``rank``, which is of this node: uint8, shape ``[region.nbytes]``."""
        self._require_near(rank, "its arena")
        return self._arenas[rank][region.offset : region.offset + region.nbytes]

    def read(self, rank: int, word: str, index: int = 0, *, afresh: bool = False) -> int:
        """``word[index]`` in the memory of ``rank``, which is of this node.

        A far word is that of the last look at it, which is no older than the last wait for it, or with ``afresh`` as it is now: what has no
        order of values (:meth:`put_word`) has to be read so.
        """
        self._require_near(rank, f"{word}[{index}]")
        if self._far is not None and word in self._far.layout.lengths:
            if afresh and self._relay is not None:
                raise ProtocolError(f"{self.names[self.rank]}: {word} has no order of values, and shown words are as old as the last look")
            return self._far.read(rank, word, index, afresh=afresh)
        return self.words.read(rank, word, index)

    def _require_near(self, rank: int, what: str) -> None:
        if rank not in self.near:
            raise ProtocolError(f"{self.names[self.rank]}: {what} in the memory of {self.names[rank]}, on another machine, cannot be read")

    def store(self, word: str, value: int, index: int = 0) -> None:
        """Store one of this rank's own words after all work before it: at once in host memory, in the order of the current stream where
        the arena is on a device.

        Raises:
            ProtocolError: the word would decrease.
        """
        self._store(self.rank, word, value, index)

    def put(self, rank: int, region: Region, data: torch.Tensor, offset: int = 0) -> None:
        """Write ``data`` (contiguous) into ``region`` of the arena of ``rank``, from byte ``offset`` of the region.

        It is visible there before what :meth:`signal` stores afterwards; until the reader has answered, ``data`` must not change. To
        another machine ``data`` has to lie in this rank's own arena.
        """
        source = data.reshape(-1).view(torch.uint8)
        if rank in self.near:
            self.view(rank, region)[offset : offset + source.numel()].copy_(source)
            return
        assert self._network is not None
        own = self._arenas[self.rank]
        if not 0 <= source.data_ptr() - own.data_ptr() <= own.nbytes - source.nbytes:
            raise ValueError(f"{source.nbytes} bytes for {self.names[rank]}: what another machine gets has to lie in this rank's own arena")
        self._network.put(rank, region.offset + offset, source)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around puts and signals that may leave together: to other machines they do at the end."""
        with self.sends():
            self._collecting = True
            try:
                yield
            finally:
                self._collecting = False
            if self._network is not None:
                self._network.submit()

    def put_word(self, rank: int, word: str, value: int, index: int = 0) -> None:
        """:meth:`put` of a payload word (:meth:`Words.put`) into the memory of ``rank``."""
        if rank in self.near:
            self.words.put(word, value, index, rank)
        else:
            self._far_words().put(rank, word, value, index)

    def signal(self, rank: int, word: str, value: int, index: int = 0) -> None:
        """Store ``word[index]`` in the memory of ``rank``, after everything this rank has put there; this rank is its only writer.

        Raises:
            ProtocolError: the word would decrease.
        """
        if rank in self.near:
            self._store(rank, word, value, index)
        else:
            self._far_words().signal(rank, word, value, index)
            if not self._collecting and self._network is not None:
                self._network.submit()
        self.signals += 1

    def _far_words(self) -> FarWords:
        assert self._far is not None  # there is no other node without
        return self._far

    def synchronize(self) -> None:
        """Wait until what was stored and put is there, on a device; it never includes a peer's work."""
        if self._memory is not None:
            self._memory.synchronize()

    def _store(self, rank: int, word: str, value: int, index: int) -> None:
        if self._memory is None:
            self.words.signal(rank, word, value, index)
            return
        position = self.words.layout.position(word, index)
        if value < self._stored.get((rank, position), 0):
            fall = f"would fall from {self._stored[rank, position]} to {value}"
            raise ProtocolError(f"rank {self.rank}: word {word}[{index}] of rank {rank} {fall}")
        self._stored[rank, position] = value
        self._memory.store(rank, position * WORD_BYTES, value)

    def wait(
        self,
        rank: int,
        word: str,
        index: int,
        at_least: int,
        operation: str,
        home: int | None = None,
        in_vain: Callable[[], str] | None = None,
    ) -> None:
        """Block until ``word[index]``, written by ``rank``, reaches ``at_least``; it lies in the memory of ``home`` (None: of ``rank``).

        Args:
            in_vain: says why that can never happen, or nothing.

        Raises:
            PeerError: some rank died, left or aborted first; the message names it and ``operation``.
            PeerTimeoutError: ``rank`` did not get there in time.
            ProtocolError: what ``in_vain`` says.
        """
        self.check(operation)
        home = rank if home is None else home
        if self._reached(home, word, index, at_least):
            return
        me, writer = self.names[self.rank], self.names[rank]
        pulse = Pulse(self._board, self._watcher, self.names, [rank], self.timeout_s)
        rounds, sleep_s, seen_off = 0, 20e-6, 0.0
        goal = f"{operation}: waiting for {word}[{index}] of {writer} to reach {at_least}"
        while not self._reached(home, word, index, at_least):
            rounds += 1
            if rounds <= _SPIN_ROUNDS:
                time.sleep(0)
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, self._max_sleep_s)
            self.check(goal)
            # Look once more each time: the word may have got there just before what makes the wait look vain.
            if rank in self._watcher.left and not self._reached(home, word, index, at_least, afresh=True):
                seen_off = seen_off or time.monotonic()
                if rank in self.near or time.monotonic() - seen_off > _IN_FLIGHT_S:
                    raise PeerError(f"{me}: {goal}: {writer} left (detached or closed its heap) and will never get there")
            if in_vain is not None and (reason := in_vain()) and not self._reached(home, word, index, at_least, afresh=True):
                raise ProtocolError(f"{me}: {operation}: {reason}")
            if fault := pulse.fault():
                raise PeerTimeoutError(f"{me}: {goal} (it is {self.read(home, word, index)}): {fault}")
            if overdue_s := pulse.overdue_s():
                unheard = pulse.unheard()
                state = f"{unheard}: it died, or" if unheard else "that rank is alive but"
                raise PeerTimeoutError(
                    f"{me}: {goal} (it is {self.read(home, word, index)}): {state} did not get there in {overdue_s:.1f} s "
                    f"({HARD_CAP_FACTOR} x odc.timeout_s); raise odc.timeout_s if it may take that long"
                )
        key = operation.split(" ", 1)[0]
        self.waited_s[key] = self.waited_s.get(key, 0.0) + time.monotonic() - pulse.start

    def _reached(self, home: int, word: str, index: int, at_least: int, *, afresh: bool = False) -> bool:
        if self._far is not None and word in self._far.layout.lengths and home in self.near:
            return self._far.reached(home, word, index, at_least, afresh=afresh)
        return self.read(home, word, index) >= at_least

    def wait_for(self, done: Callable[[], bool], operation: str) -> None:
        """Block until ``done()``, which needs every rank; all of them are watched meanwhile, as :meth:`wait` watches one.

        Raises:
            PeerError: some rank died or aborted.
            PeerTimeoutError: some rank showed no heartbeat for ``timeout_s``, or it took :data:`HARD_CAP_FACTOR` times as long.
        """
        me, others = self.names[self.rank], [r for r in range(self.world_size) if r != self.rank]
        pulse = Pulse(self._board, self._watcher, self.names, others, self.timeout_s)
        sleep_s = 20e-6
        while not done():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
            self.check(operation)
            if fault := pulse.fault():
                raise PeerTimeoutError(f"{me}: {operation}: {fault}")
            if overdue_s := pulse.overdue_s():
                unheard = f"; {text}" if (text := pulse.unheard()) else ""
                raise PeerTimeoutError(
                    f"{me}: {operation}: not all ranks got there in {overdue_s:.1f} s ({HARD_CAP_FACTOR} x odc.timeout_s){unheard}; raise "
                    "odc.timeout_s if it may take that long"
                )

    def check(self, operation: str) -> None:
        """Raise :class:`PeerError` if any rank died or aborted."""
        me = self.names[self.rank]
        if text := self._board.abort_message(self.rank):
            raise PeerError(f"{me}: {operation}: this rank failed before: {text}")
        if dead := self._watcher.dead:
            who = ", ".join(self.names[r] for r in dead)
            # A rank that failed with a message wrote it before it ended: its own words are worth more than "it died".
            said = "; ".join(t for t in (self._board.abort_message(r) for r in dead) if t)
            raise PeerError(f"{me}: {operation}: {who} died" + (f" after: {said}" if said else " (its process ended without a goodbye)"))
        for r, text in self._board.aborted().items():
            if r != self.rank:
                raise PeerError(f"{me}: {operation}: {self.names[r]} aborted: {text}")

    def abort(self, message: str) -> None:
        """Tell every peer that this rank failed; the first message stands."""
        self._board.abort(message)
        self._watcher.tell()

    def close(self, *, goodbye: bool = True) -> None:
        """Leave: stop the watcher; peers are told of memory that cannot be closed. Segments are freed with the last view and process."""
        if self._relay is not None:
            self._relay.stop()
        try:
            if self._memory is not None:
                self._memory.close()
        except BaseException as error:
            self.abort(f"closing the heap: {error}")
            goodbye = False  # what this rank stored last may never be there
            raise
        finally:
            self._watcher.stop(goodbye=goodbye)
