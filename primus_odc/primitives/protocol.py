"""The on-demand protocol of one rank, free of memory and of time.

Each operation is a generator of *effects*: ``Wait`` (a peer's word must reach a value), ``Do`` (move data now), ``Store`` (write one of
this rank's own words) and, across nodes only, ``Send`` (:mod:`primus_odc.primitives.two_level`). The engine runs the effects for real
(:mod:`primus_odc.primitives.driver`); a test runs the very same generators of many ranks interleaved at random against a simulated memory
that detects torn and stale reads. There is no second implementation.

Words (64-bit, monotonic, one writer each; k is the epoch, i.e. the number of the minibatch, from 1):

===================  ======  ==========================================================================================
word                 writer  meaning
===================  ======  ==========================================================================================
``published``        rank    shards of epoch k are complete in this rank's arena
``done``             rank    this rank has finished epoch k: it will gather nothing and pull nothing of k any more
``begun``            rank    this rank has begun the minibatch of epoch k; covers no data, only tells calls that do not fit together
``ready[g]``         source  ``2k + 1``: gradients of group g of epoch k are complete; ``2k``: this rank has none
``final``            source  (owner mode) everything this rank pushes in epoch k has been pushed
``summed``           owner   (owner mode) this rank's accumulators of epoch k are complete; replicas of its shards may read them
``head[o]``          source  (owner mode) pieces pushed into the ring at owner o so far
``tail[s]``          owner   (owner mode) pieces from source s added and their slots free again
``normed``           rank    number of scalar exchanges this rank has entered
``closed``           rank    this rank has detached
===================  ======  ==========================================================================================

Invariants:

1. Shards of k stay unchanged from ``published = k`` until every rank has ``done >= k``.
2. A source's gradient buffer stays unchanged from ``ready = 2k(+1)`` until the source's own publish(k+1) has returned, which waits for
   every ``done >= k``.
3. An accumulator is unchanged from ``summed = k`` until every rank has ``done >= k``: a source can push pieces of k+1 only after its
   publish(k+1), which waits for all of them. The first piece of an epoch overwrites, so nothing has to be reset in between.
4. A word is stored only after the data it covers is complete and visible.
5. Replicas of a shard (HSDP) add the same numbers in the same order, whatever arrived first: in ``owner`` mode sources push inside their
   own shard group only, and the replicas' accumulators are then added in replica order by each of them. Else they would drift apart.
6. Nobody waits for a peer inside a device stream; every wait is an effect of this file.

State of a rank: PUBLISHED (gathers legal: training not begun, evaluation) -> begin -> ACTIVE (gathers and reductions) -> settle ->
SETTLED (gathers refused: own parameters are about to change) -> publish -> PUBLISHED of the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from primus_odc.errors import ProtocolError
from primus_odc.primitives.nodes import Nodes

ReadWord = Callable[[int, str, int], int]


@dataclass(frozen=True, slots=True)
class Wait:
    """``word[index]``, which ``rank`` writes, must reach ``at_least``; ``operation`` says why, for messages and for counting waited time.

    The word lies in the memory of ``home``; None: in that of its writer, where a rank of another node cannot read it. ``in_vain`` says
    why the wait can never end, or nothing, from words as they are now.
    """

    rank: int
    word: str
    index: int
    at_least: int
    operation: str
    home: int | None = None
    in_vain: Callable[[ReadWord], str] | None = None


@dataclass(frozen=True, slots=True)
class Do:
    """Run ``action`` now; it moves data, or gives a device stream the work, and neither waits for a peer nor touches words."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Store:
    """Write one of this rank's own words, after everything before it is visible: on a device, when the stream has got there."""

    word: str
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class Send:
    """Write into the memory of ``rank``, which is in another node: ``put`` moves data there (None: nothing to move), and ``word[index]``
    there becomes ``value`` no earlier than the data are visible (put-with-signal). This rank is the word's only writer, and what it sends
    to one rank arrives in order."""

    rank: int
    word: str
    index: int
    value: int
    put: Callable[[], None] | None = None


Effect = Wait | Do | Store | Send
Steps = Generator[Effect, None, None]


class State(Enum):
    """Where a rank stands between two optimizer steps."""

    PUBLISHED = "published"
    ACTIVE = "active"
    SETTLED = "settled"
    CLOSED = "closed"


class DataPlane(Protocol):
    """What moves the bytes. Every method is called from a ``Do`` effect of the rank that owns the plane."""

    def reshard(self) -> None:
        """Drop every unsharded parameter, so that nothing gathered in an older epoch is used again."""

    def publish_shard(self, group: int, epoch: int) -> None:
        """Copy this rank's own parameter shard of ``group`` into its arena."""

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        """Copy the published shard of ``owner`` to its place in ``into``."""

    def accumulate(self, group: int, contribution: Any) -> None:
        """(local mode) Add one reduction's gradients to this rank's unsharded buffer of ``group``."""

    def complete(self, group: int, epoch: int) -> None:
        """Make this rank's buffer (local mode) or accumulator (owner mode) of ``group`` ready to be pulled: zero what received nothing."""

    def pull(self, source: int, group: int, epoch: int) -> None:
        """Add what ``source`` has for this rank's shard of ``group`` to the sum: its slice of the buffer of a source (local mode), the
        accumulator of a replica (owner mode)."""

    def push(self, owner: int, slot: int, group: int, epoch: int, piece: Any) -> None:
        """(owner mode) Copy one piece into slot ``slot`` of the ring this rank has at ``owner``."""

    def add_own(self, group: int, epoch: int, piece: Any) -> None:
        """(owner mode) Add a piece this rank owns itself straight to its accumulator."""

    def add_arrival(self, source: int, slot: int, epoch: int) -> None:
        """(owner mode) Add the piece in slot ``slot`` of the ring of ``source`` to the accumulator it names."""

    def finish_transfers(self) -> None:
        """What is stored next covers every gather and push this rank has started: their sources may change afterwards."""

    def deliver(self, group: int) -> None:
        """Turn the finished sum of ``group`` into ``.grad`` and reset the sum."""


@dataclass(frozen=True)
class Topology:
    """Who talks to whom.

    ``ranks`` heap ranks in all (HSDP replicas included); ``peers`` the heap ranks of this rank's shard group in shard order; ``replicas``
    those that own the same shard as this rank, this rank included, in replica order; ``nodes`` which ranks share a node, None where all
    do.
    """

    rank: int
    ranks: int
    peers: Sequence[int]
    replicas: Sequence[int]
    groups: Sequence[str]
    names: Sequence[str]
    nodes: Nodes | None = None

    @property
    def near(self) -> Sequence[int]:
        """The ranks whose memory this one can read, itself included."""
        return range(self.ranks) if self.nodes is None else self.nodes.members[self.nodes.node_of[self.rank]]


class RankProtocol:
    """One rank's side of the protocol. ``mode`` is ``local`` or ``owner``; ``slots`` the ring length per (source, owner) pair."""

    def __init__(self, topology: Topology, plane: DataPlane, mode: str, slots: int = 0) -> None:
        self.t = topology
        self.plane = plane
        self.mode = mode
        self.slots = slots
        self.state = State.SETTLED  # epoch 0 is over before anything was published
        self.epoch = 0
        self.has_data = [False] * len(topology.groups)
        self.declared = [False] * len(topology.groups)
        self._heads = [0] * topology.ranks
        self._tails = [0] * topology.ranks
        self._exchanges = 0

    def publish(self) -> Steps:
        """Make this rank's parameters visible as the next epoch.

        Without a minibatch since the last publish (a load, an EMA swap) the epoch in between is settled empty: this rank's ``done`` moves
        on, and the other ranks make the same call.
        """
        self._require("publish", State.SETTLED, State.PUBLISHED)
        in_vain = None
        if self.state is State.PUBLISHED:
            in_vain = self._unless_begun("publish()", range(self.t.ranks))
            yield from self._finish()
        k = self.epoch + 1
        self.state = State.SETTLED  # until the copy is complete a gather must not run
        yield from self._until_all("done", k - 1, f"publish of all groups (epoch {k})", in_vain)
        yield Do(self.plane.reshard)
        for g in range(len(self.t.groups)):
            yield Do(lambda g=g: self.plane.publish_shard(g, k))  # type: ignore[misc]
        yield Store("published", 0, k)
        self.epoch = k
        self.state = State.PUBLISHED

    def begin(self) -> None:
        """Enter the minibatch of the current epoch; no communication."""
        self._require("begin_minibatch", State.PUBLISHED)
        self.state = State.ACTIVE
        self.has_data = [False] * len(self.t.groups)
        self.declared = [False] * len(self.t.groups)

    def gather(self, group: int, into: Any, *, own: bool = False) -> Steps:
        """Read the shards of ``group`` from their owners, with ``own`` from this rank too; legal in any number while PUBLISHED or
        ACTIVE."""
        self._require(f"gather of group {self.t.groups[group]}", State.PUBLISHED, State.ACTIVE)
        k = self.epoch
        operation = f"gather of group {self.t.groups[group]} (epoch {k})"
        for owner in self._rotated(self.t.peers):
            if own or owner != self.t.rank:
                yield Wait(owner, "published", 0, k, operation)
                yield Do(lambda owner=owner: self.plane.read_shard(owner, group, k, into))  # type: ignore[misc]

    def reduce_local(self, group: int, contribution: Any) -> Steps:
        """(local mode) Add one reduction of FSDP2's to this rank's own buffer."""
        self._require_reduce(group)
        self.has_data[group] = True
        yield Do(lambda: self.plane.accumulate(group, contribution))

    def reduce_owner(self, group: int, pieces: Sequence[tuple[int, Any]]) -> Steps:
        """(owner mode) Push ``(owner, piece)`` pairs to owners of the own shard group; waits for a free slot, never for the owner's own
        progress."""
        self._require_reduce(group)
        self.has_data[group] = True
        k = self.epoch
        for owner, piece in pieces:
            if owner == self.t.rank:
                yield Do(lambda piece=piece: self.plane.add_own(group, k, piece))  # type: ignore[misc]
                continue
            head = self._heads[owner]
            yield Wait(owner, "tail", self.t.rank, head - self.slots + 1, f"push of group {self.t.groups[group]} (epoch {k})")
            yield Do(lambda owner=owner, head=head, piece=piece: self.plane.push(owner, head % self.slots, group, k, piece))  # type: ignore[misc]
            self._heads[owner] = head + 1
            yield Store("head", owner, head + 1)

    def declare(self, group: int) -> Steps:
        """This rank adds nothing more to ``group`` in this epoch (no-op when said before)."""
        self._require("declaration of a group", State.ACTIVE)
        if self.declared[group]:
            return
        self.declared[group] = True
        if self.mode == "local":
            if self.has_data[group]:
                yield Do(lambda: self.plane.complete(group, self.epoch))
            yield Store("ready", group, 2 * self.epoch + self.has_data[group])

    def settle(self, read_word: ReadWord) -> Steps:
        """Sum what every source of the mesh has for this rank's shards, make it ``.grad``, and finish the epoch."""
        self._require("settle", State.ACTIVE)
        k = self.epoch
        for g in range(len(self.t.groups)):
            yield from self.declare(g)
        yield Do(self.plane.reshard)  # the optimizer works on the sharded parameters
        if self.mode == "local":
            # Groups complete in backward order, the last one first; the order of sources is fixed, so the sum is reproducible.
            for g in reversed(range(len(self.t.groups))):
                for source in range(self.t.ranks):
                    if source == self.t.rank:
                        has_data = self.has_data[g]  # own data: the plane knows when they are complete, the host need not wait
                    else:
                        yield Wait(source, "ready", g, 2 * k, f"settle of group {self.t.groups[g]} (epoch {k})")
                        has_data = read_word(source, "ready", g) == 2 * k + 1
                    if has_data:
                        yield Do(lambda s=source, g=g: self.plane.pull(s, g, k))  # type: ignore[misc]
                yield Do(lambda g=g: self.plane.deliver(g))  # type: ignore[misc]
        else:
            yield Do(self.plane.finish_transfers)
            yield Store("final", 0, k)
            for source in self._rotated(self.t.peers):
                if source != self.t.rank:
                    yield Wait(source, "final", 0, k, f"settle of all groups (epoch {k})")
                    pushed, reason = read_word(source, "head", self.t.rank), f"adding what {self.t.names[source]} pushed"
                    yield Wait(self.t.rank, "tail", source, pushed, f"settle of all groups ({reason}, epoch {k})")
            for g in range(len(self.t.groups)):
                yield Do(lambda g=g: self.plane.complete(g, k))  # type: ignore[misc]
            yield Store("summed", 0, k)
            for g in range(len(self.t.groups)):
                for owner in self.t.replicas:
                    if owner != self.t.rank:
                        yield Wait(owner, "summed", 0, k, f"settle of group {self.t.groups[g]} (epoch {k})")
                    yield Do(lambda r=owner, g=g: self.plane.pull(r, g, k))  # type: ignore[misc]
                yield Do(lambda g=g: self.plane.deliver(g))  # type: ignore[misc]
        yield from self._finish()
        self.state = State.SETTLED

    def serve(self, read_word: ReadWord, source: int) -> Steps:
        """(owner mode) Add what ``source`` has pushed and free its slots; run by the owner's progress thread.

        Arrivals belong to the first epoch this rank has not finished (invariant 3). ``head`` is read before ``done``, so a piece of
        the next epoch, which exists only after ``done``, is never taken for one of this.
        """
        head, tail = read_word(source, "head", self.t.rank), self._tails[source]
        epoch = read_word(self.t.rank, "done", 0) + 1
        for position in range(tail, head):
            yield Do(lambda position=position: self.plane.add_arrival(source, position % self.slots, epoch))  # type: ignore[misc]
            self._tails[source] = position + 1  # not read back from the word, which a device stores later
            yield Store("tail", source, position + 1)

    def exchange(self, put: Callable[[int], None], operation: str) -> Iterator[Effect]:
        """Rendezvous of the shard group around one small payload; ``put(parity)`` stores it in one of two alternating places.

        Two places are enough: a rank enters exchange n + 2 only after every peer entered n + 1, hence finished reading n.
        """
        self._exchanges += 1
        n = self._exchanges
        in_vain = self._unless_begun("a gradient norm", self.t.peers)
        yield Do(lambda: put(n % 2))
        yield Store("normed", 0, n)
        for r in self.t.peers:
            if r != self.t.rank:
                yield Wait(r, "normed", 0, n, operation, in_vain=in_vain)

    def close(self) -> Steps:
        """Finish the current epoch, say ``closed`` and wait until every rank has said so."""
        self._require("detach", State.PUBLISHED, State.SETTLED)
        in_vain = self._unless_begun("detach()", range(self.t.ranks))
        if self.state is State.PUBLISHED:
            yield from self._finish()
        yield Store("closed", 0, 1)
        yield from self._until_all("closed", 1, "detach", in_vain)
        self.state = State.CLOSED

    def scalar_of(self, peer: int, parity: int) -> tuple[int, str, int]:
        """Where ``peer``'s number of the last :meth:`exchange` lies for this rank: ``(whose memory, word, index)``."""
        return peer, "scalar", parity

    def _finish(self) -> Steps:
        """This rank reads nothing of the current epoch any more."""
        yield Do(self.plane.finish_transfers)
        yield Store("done", 0, self.epoch)

    def _until_all(self, word: str, at_least: int, operation: str, in_vain: Callable[[ReadWord], str] | None = None) -> Steps:
        """Wait until ``word``, which this rank has stored already, has reached ``at_least`` on every rank."""
        for r in self._rotated(range(self.t.ranks)):
            if r != self.t.rank:
                yield Wait(r, word, 0, at_least, operation, in_vain=in_vain)

    def _unless_begun(self, call: str, ranks: Sequence[int]) -> Callable[[ReadWord], str]:
        """For waits of a call that all of ``ranks`` make outside their minibatches: who is in the next one will not make it any more, and
        cannot end it without this rank.

        Ranks of other nodes are left to those of their own: their words cannot be read here.
        """
        following = self.epoch + (self.state is State.SETTLED)

        def in_vain(read_word: ReadWord) -> str:
            begun = [self.t.names[r] for r in ranks if r in self.t.near and read_word(r, "begun", 0) == following]
            reason = f"began minibatch {following} without {call}, which every rank has to call at the same place between two minibatches"
            return f"{', '.join(begun)} {reason}" if begun else ""

        return in_vain

    def _rotated(self, ranks: Sequence[int]) -> list[int]:
        """``ranks`` starting behind this one, so that not everybody reads from the same peer first."""
        start = list(ranks).index(self.t.rank)
        return [ranks[(start + i) % len(ranks)] for i in range(len(ranks))]

    def _require_reduce(self, group: int) -> None:
        self._require(f"reduction of group {self.t.groups[group]}", State.ACTIVE)
        if self.declared[group]:
            raise ProtocolError(
                f"{self.t.names[self.t.rank]}: gradients of group {self.t.groups[group]} arrived after the group was declared complete in "
                f"epoch {self.epoch}: more backward passes ran than begin_minibatch(num_microbatches=...) announced, or a microbatch is "
                "not one forward and one backward of the root module; pass num_microbatches=None and do not call last_microbatch()"
            )

    def _require(self, operation: str, *states: State) -> None:
        if self.state not in states:
            hint = {
                State.PUBLISHED: "call begin_minibatch() first",
                State.ACTIVE: "call settle() first",
                State.SETTLED: "call publish() or begin_minibatch() first: parameters are between two epochs",
                State.CLOSED: "the engine is detached",
            }[self.state]
            raise ProtocolError(
                f"{self.t.names[self.t.rank]}: {operation} is not possible in epoch {self.epoch}, state '{self.state.value}': {hint}"
            )
