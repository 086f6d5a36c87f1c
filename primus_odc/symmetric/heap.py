"""SymmetricHeap: one arena and one block of control words per rank, readable and writable by every peer.

The words lie in host memory always. The arena lies beside them, or in device memory; then words that cover device work are stored by the
stream that does it (:meth:`SymmetricHeap.store`).

The heap knows nothing of parameters or gradients. It offers byte views of any rank's arena, the control words, and the only blocking
call of the library, :meth:`SymmetricHeap.wait`, which ends with an error that names the peer when the peer died, left, aborted or
fell silent.

Start-up: after mapping, every rank writes a value derived from (writer, reader) into its own arena and into every peer's, and every
rank checks what it reads in both directions, so a wrong mapping or a stale view is found before the first step.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from primus_odc.errors import OdcError, PeerError, PeerTimeoutError, ProtocolError
from primus_odc.symmetric.arena import ArenaPlan, Region, align
from primus_odc.symmetric.host import Exchange, connect_host_mesh
from primus_odc.symmetric.liveness import PeerWatcher
from primus_odc.symmetric.words import WORD_BYTES, WordLayout, Words

ABORT_TEXT_BYTES = 1024
HARD_CAP_FACTOR = 3
"""A peer that beats but never arrives is given up after this many time-outs (it is stuck elsewhere, e.g. in a collective)."""

_HEAP_WORDS = {"heartbeat": 1, "abort": 1, "closed": 1, "mapped": 1}
_SPIN_ROUNDS = 20
_MAX_SLEEP_S = 0.001
_MAX_SLEEP_DEVICE_S = 0.00005
"""Beside a device a host has nothing else to do, and what it waits for is on the critical path."""


class Memory(Protocol):
    """Device memory of all ranks (:class:`primus_odc.symmetric.symm_mem.DeviceMemory`)."""

    arenas: list[torch.Tensor]

    def store(self, rank: int, offset: int, value: int) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


MakeMemory = Callable[[int, list[torch.Tensor]], Memory]
"""``(arena bytes, every rank's words as bytes)`` -> memory; collective."""


def _heartbeat(words: Words) -> Callable[[], None]:
    # A function of the words alone: through a method of the heap, heap and watcher would hold each other, and where the garbage
    # collector is off the segments of a closed heap would stay mapped.
    beats = itertools.count(1)
    return lambda: words.write("heartbeat", next(beats))


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

    Attributes:
        sending: around every :meth:`put` with its :meth:`signal`; who has a stream for them makes it the current one.
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
    ) -> None:
        self.rank = rank
        self.world_size = len(names)
        self.names = names
        self.timeout_s = timeout_s
        self.plan = plan
        self.waited_s: dict[str, float] = {}
        self.signals = 0
        self.sending: Callable[[], AbstractContextManager[None]] = nullcontext
        self._probe = plan.add("heap.probe", 16 * self.world_size)
        layout = WordLayout.of({**_HEAP_WORDS, **words})
        self._abort_text = align(layout.nbytes)
        self._data = self._abort_text + align(ABORT_TEXT_BYTES)
        nbytes = self._data + (max(plan.nbytes, 1) if make_memory is None else 0)
        mesh = connect_host_mesh(rank, self.world_size, nbytes, exchange, timeout_s)
        self._segments = [torch.frombuffer(segment, dtype=torch.uint8) for segment in mesh.segments]
        blocks = [s[: layout.nbytes].numpy().view(np.int64) for s in self._segments]
        self.words = Words(layout, blocks, rank)
        self._watcher = PeerWatcher(mesh.sockets, _heartbeat(self.words))
        weakref.finalize(self, _leave, self._watcher)  # also at interpreter exit
        self._memory: Memory | None = None
        self._stored: dict[tuple[int, int], int] = {}
        try:
            if make_memory is None:
                self._arenas = [s[self._data :] for s in self._segments]
            else:
                self._memory = make_memory(max(plan.nbytes, 1), [s[: layout.nbytes] for s in self._segments])
                self._arenas = self._memory.arenas
            self._max_sleep_s = _MAX_SLEEP_S if self._memory is None else _MAX_SLEEP_DEVICE_S
            self._check_mapping()
        except BaseException as error:
            self.abort(str(error))
            self.close(goodbye=False)
            raise

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return self._arenas[self.rank].device

    @property
    def arena_nbytes(self) -> int:
        """Bytes this rank shares: regions, words and abort text."""
        return self._data + self.plan.nbytes

    def view(self, rank: int, region: Region) -> torch.Tensor:
        """The bytes of ``region`` in the arena of ``rank``: uint8, shape ``[region.nbytes]``."""
        return self._arenas[rank][region.offset : region.offset + region.nbytes]

    def store(self, word: str, value: int, index: int = 0) -> None:
        """Store one of this rank's own words after all work before it: at once in host memory, in the order of the current stream where
        the arena is on a device.

        Raises:
            ProtocolError: the word would decrease.
        """
        self._store(self.rank, word, value, index)

    def put(self, rank: int, region: Region, data: torch.Tensor, offset: int = 0) -> None:
        """Write ``data`` (contiguous) into ``region`` of the arena of ``rank``, from byte ``offset`` of the region.

        It is visible there before what :meth:`signal` stores afterwards; until the reader has answered, ``data`` must not change.
        """
        source = data.reshape(-1).view(torch.uint8)
        self.view(rank, region)[offset : offset + source.numel()].copy_(source)

    def put_word(self, rank: int, word: str, value: int, index: int = 0) -> None:
        """:meth:`put` of a payload word (:meth:`Words.put`) into the memory of ``rank``."""
        self.words.put(word, value, index, rank)

    def signal(self, rank: int, word: str, value: int, index: int = 0) -> None:
        """Store ``word[index]`` in the memory of ``rank``, after everything this rank has put there; this rank is its only writer.

        Raises:
            ProtocolError: the word would decrease.
        """
        self._store(rank, word, value, index)
        self.signals += 1

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
        if self.words.read(home, word, index) >= at_least:
            return
        start = now = last_beat_at = time.monotonic()
        last_beat = self.words.read(rank, "heartbeat")
        rounds, sleep_s = 0, 20e-6
        goal = f"{operation}: waiting for {word}[{index}] of {self.names[rank]} to reach {at_least}"
        while self.words.read(home, word, index) < at_least:
            rounds += 1
            if rounds > _SPIN_ROUNDS:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, self._max_sleep_s)
                self.check(goal)
                if rank in self._watcher.left and self.words.read(home, word, index) < at_least:
                    me, writer = self.names[self.rank], self.names[rank]
                    raise PeerError(f"{me}: {goal}: {writer} left (detached or closed its heap) and will never get there")
                # Read once more: the word may have got there just before what makes the wait look vain.
                if in_vain is not None and (reason := in_vain()) and self.words.read(home, word, index) < at_least:
                    raise ProtocolError(f"{self.names[self.rank]}: {operation}: {reason}")
                now = time.monotonic()
                beat = self.words.read(rank, "heartbeat")
                if beat != last_beat:
                    last_beat, last_beat_at = beat, now
                self._check_time(goal, now - last_beat_at, now - start, self.words.read(home, word, index))
            else:
                time.sleep(0)
        key = operation.split(" ", 1)[0]
        self.waited_s[key] = self.waited_s.get(key, 0.0) + time.monotonic() - start

    def wait_for(self, done: Callable[[], bool], operation: str) -> None:
        """Block until ``done()``, which needs every rank; all of them are watched meanwhile, as :meth:`wait` watches one.

        Raises:
            PeerError: some rank died or aborted.
            PeerTimeoutError: some rank showed no heartbeat for ``timeout_s``, or it took :data:`HARD_CAP_FACTOR` times as long.
        """
        start = time.monotonic()
        beats = {r: (self.words.read(r, "heartbeat"), start) for r in range(self.world_size) if r != self.rank}
        sleep_s = 20e-6
        while not done():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
            self.check(operation)
            now = time.monotonic()
            for r, (known, since) in beats.items():
                beat = self.words.read(r, "heartbeat")
                if beat != known:
                    beats[r] = beat, now
                elif now - since > self.timeout_s and r not in self._watcher.left:  # it may have done its part before it left
                    raise PeerTimeoutError(
                        f"{self.names[self.rank]}: {operation}: no sign of life from {self.names[r]} for {now - since:.1f} s "
                        f"(odc.timeout_s = {self.timeout_s:g})"
                    )
            if now - start > HARD_CAP_FACTOR * self.timeout_s:
                raise PeerTimeoutError(
                    f"{self.names[self.rank]}: {operation}: not all ranks got there in {now - start:.1f} s ({HARD_CAP_FACTOR} x "
                    "odc.timeout_s); raise odc.timeout_s if it may take that long"
                )

    def _check_time(self, goal: str, silent_s: float, total_s: float, value: int) -> None:
        me = self.names[self.rank]
        if silent_s > self.timeout_s:
            raise PeerTimeoutError(
                f"{me}: {goal} (it is {value}): no sign of life from it for {silent_s:.1f} s (odc.timeout_s = {self.timeout_s:g})"
            )
        if total_s > HARD_CAP_FACTOR * self.timeout_s:
            raise PeerTimeoutError(
                f"{me}: {goal} (it is {value}): that rank is alive but did not get there in {total_s:.1f} s "
                f"({HARD_CAP_FACTOR} x odc.timeout_s); raise odc.timeout_s if it may take that long"
            )

    def check(self, operation: str) -> None:
        """Raise :class:`PeerError` if any rank died or aborted."""
        me = self.names[self.rank]
        if text := self._abort_message(self.rank):
            raise PeerError(f"{me}: {operation}: this rank failed before: {text}")
        if dead := self._watcher.dead:
            who = ", ".join(self.names[r] for r in dead)
            # A rank that failed with a message wrote it before it ended: its own words are worth more than "it died".
            said = "; ".join(t for t in (self._abort_message(r) for r in dead) if t)
            raise PeerError(f"{me}: {operation}: {who} died" + (f" after: {said}" if said else " (its process ended without a goodbye)"))
        for r in range(self.world_size):
            if r != self.rank and (text := self._abort_message(r)):
                raise PeerError(f"{me}: {operation}: {self.names[r]} aborted: {text}")

    def abort(self, message: str) -> None:
        """Tell every peer that this rank failed; the first message stands."""
        if self.words.read(self.rank, "abort"):
            return
        data = message.encode()[: ABORT_TEXT_BYTES - 1].ljust(ABORT_TEXT_BYTES, b"\0")
        text = self._segments[self.rank][self._abort_text : self._abort_text + ABORT_TEXT_BYTES]
        text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.words.write("abort", 1)

    def _abort_message(self, rank: int) -> str:
        if not self.words.read(rank, "abort"):
            return ""
        text = self._segments[rank][self._abort_text : self._abort_text + ABORT_TEXT_BYTES]
        return bytes(text.numpy()).rstrip(b"\0").decode(errors="replace") or "no message"

    def close(self, *, goodbye: bool = True) -> None:
        """Leave: stop the watcher. The segments are freed with the last view and the last process."""
        if self._memory is not None:
            self._memory.close()
        self._watcher.stop(goodbye=goodbye)

    def _check_mapping(self) -> None:
        """Every pair, both directions: I read what the owner wrote for me, the owner reads what I wrote into its arena."""

        def expected(writer: int, reader: int) -> int:
            return 0x5D0C << 32 | writer << 16 | reader

        def cells(rank: int) -> torch.Tensor:
            return self.view(rank, self._probe).view(torch.int64).view(2, self.world_size)

        for peer in range(self.world_size):
            cells(self.rank)[0, peer] = expected(self.rank, peer)  # for `peer` to pull
            cells(peer)[1, self.rank] = expected(self.rank, peer)  # pushed to `peer`
        if self._memory is not None:
            self._memory.synchronize()
        self.words.write("mapped", 1)
        for peer in range(self.world_size):
            self.wait(peer, "mapped", 0, 1, "start-up pattern test")
            pulled, pushed = int(cells(peer)[0, self.rank]), int(cells(self.rank)[1, peer])
            if pulled != expected(peer, self.rank) or pushed != expected(peer, self.rank):
                raise OdcError(
                    f"{self.names[self.rank]}: start-up pattern test with {self.names[peer]} failed: pulled {pulled:#x}, pushed "
                    f"{pushed:#x}, expected {expected(peer, self.rank):#x}: its memory is mapped wrongly"
                )
        # A rank that sees nothing wrong itself may be the one whose writes go astray: nobody starts before all are content.
        self.words.write("mapped", 2)
        for peer in range(self.world_size):
            self.wait(peer, "mapped", 0, 2, "start-up pattern test")
