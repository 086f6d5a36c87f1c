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
``ready[g]``         source  ``2k + 1``: gradients of group g of epoch k are complete, in ``owner`` mode all pushed; ``2k``: there are none
``summed[g]``        owner   (owner mode) this rank's accumulator of group g is complete for epoch k; replicas of its shard may read it
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
7. (owner mode) A reduction waits for no peer. Where no slot is free at an owner, what belongs there is kept and added up in this rank's own
   memory until a later call finds one; the last of it is pushed in settle, which may wait. A group is ready when nothing of it is kept.
8. (owner mode) Groups are summed and delivered in one order, the last one first, by whoever finds them complete: a reduction of the last
   backward (``deliver_complete``, which waits for nobody), or settle. A host that stays close to its device would else begin when backward
   is over.

State of a rank: PUBLISHED (gathers legal: training not begun, evaluation) -> begin -> ACTIVE (gathers and reductions) -> settle ->
SETTLED (gathers refused: own parameters are about to change) -> publish -> PUBLISHED of the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

from primus_odc.errors import ProtocolError
from primus_odc.primitives.effects import Do, Effect, ReadWord, Steps, Store, Wait
from primus_odc.primitives.pushes import Pushes
from primus_odc.primitives.topology import DataPlane, Topology


class State(Enum):
    """Where a rank stands between two optimizer steps."""

    PUBLISHED = "published"
    ACTIVE = "active"
    SETTLED = "settled"
    CLOSED = "closed"


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
        self.pushes = Pushes(topology, plane, slots)
        self._tails = [0] * topology.ranks
        self._unsaid: list[int] = []
        self._unsummed = self._undelivered = 0
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

    def land(self) -> Steps:
        """Part of publish: what has to be sent to other nodes, which may take its time."""
        yield from ()

    def begin(self) -> None:
        """Enter the minibatch of the current epoch; no communication."""
        self._require("begin_minibatch", State.PUBLISHED)
        self.state = State.ACTIVE
        self.has_data = [False] * len(self.t.groups)
        self.declared = [False] * len(self.t.groups)
        self._unsummed = self._undelivered = len(self.t.groups)

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

    def reduce_owner(self, group: int, pieces: Sequence[tuple[int, Any]], read_word: ReadWord) -> Steps:
        """(owner mode) Push ``(owner, piece)`` pairs to owners of the own shard group; never waits for one, what finds no slot is kept."""
        self._require_reduce(group)
        self.has_data[group] = True
        k = self.epoch
        for owner, piece in pieces:
            if owner == self.t.rank:
                yield Do(lambda piece=piece: self.plane.add_own(group, k, piece))  # type: ignore[misc]
                continue
            yield from self.pushes.push_or_keep(owner, group, k, piece, read_word)

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
        else:
            self._unsaid.append(group)
            yield from self._say_ready()

    def _say_ready(self) -> Steps:
        """(owner mode) Store ``ready`` of every declared group of which nothing is kept any more."""
        sayable = [g for g in self._unsaid if not self.pushes.keeps(g)]
        if sayable:
            yield Do(self.plane.finish_pushes)
        for g in sayable:
            self._unsaid.remove(g)
            yield Store("ready", g, 2 * self.epoch + self.has_data[g])

    def settle(self, read_word: ReadWord) -> Steps:
        """Sum what every source of the mesh has for this rank's shards, make it ``.grad``, and finish the epoch."""
        self._require("settle", State.ACTIVE)
        k = self.epoch
        for g in range(len(self.t.groups)):
            yield from self.declare(g)
        if self.mode == "local":
            yield Do(self.plane.reshard)  # the optimizer works on the sharded parameters
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
            for owner in self.pushes.owners:
                yield from self.pushes.push_kept(owner, k, read_word, wait=True)
            yield from self._say_ready()
            # The rank that comes last has its sums under way before its host reshards, the others reshard while they would wait.
            yield from self._sum_arrivals(read_word, wait=False)
            yield Do(self.plane.reshard)
            yield from self._sum_arrivals(read_word, wait=True)
        yield from self._finish()
        self.state = State.SETTLED

    def deliver_complete(self, read_word: ReadWord) -> Steps:
        """(owner mode) Part of settle, ahead of it: deliver the groups that are complete at every source already; waits for nobody."""
        self._require("delivery of complete groups", State.ACTIVE)
        yield from self._sum_arrivals(read_word, wait=False)

    def _sum_arrivals(self, read_word: ReadWord, *, wait: bool) -> Steps:
        """(owner mode) Sum and deliver what is neither, groups in backward order; without ``wait`` up to the first that has to be waited
        for."""

        def there(waits: Iterator[Wait]) -> bool:
            return all(read_word(w.rank, w.word, w.index) >= w.at_least for w in waits)

        for g in reversed(range(self._undelivered)):
            if g < self._unsummed:
                if not wait and not (self.declared[g] and there(self._arrivals(g, read_word))):
                    return
                if wait:
                    yield from self._arrivals(g, read_word)
                yield Do(lambda g=g: self.plane.complete(g, self.epoch))  # type: ignore[misc]
                yield Store("summed", g, self.epoch)
                self._unsummed = g
            if not wait and not there(self._replica_sums(g)):
                return
            if wait:
                yield from self._replica_sums(g)
            for owner in self.t.replicas:
                yield Do(lambda r=owner, g=g: self.plane.pull(r, g, self.epoch))  # type: ignore[misc]
            yield Do(lambda g=g: self.plane.deliver(g))  # type: ignore[misc]
            self._undelivered = g

    def _arrivals(self, group: int, read_word: ReadWord) -> Iterator[Wait]:
        """What has to be so before this rank's accumulator of ``group`` has everything that other ranks pushed."""
        operation = f"settle of group {self.t.groups[group]} (epoch {self.epoch})"
        for source in self._rotated(self.t.peers):
            if source != self.t.rank:
                yield Wait(source, "ready", group, 2 * self.epoch, operation)
                # What it pushed before it said so; perhaps pieces of other groups too.
                pushed, reason = read_word(source, "head", self.t.rank), f"adding what {self.t.names[source]} pushed"
                yield Wait(self.t.rank, "tail", source, pushed, f"{operation[:-1]}, {reason})")

    def _replica_sums(self, group: int) -> Iterator[Wait]:
        operation = f"settle of group {self.t.groups[group]} (epoch {self.epoch})"
        return (Wait(owner, "summed", group, self.epoch, operation) for owner in self.t.replicas if owner != self.t.rank)

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
