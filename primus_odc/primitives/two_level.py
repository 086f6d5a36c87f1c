"""The protocol across nodes: memory of the own node is read and written directly, that of another node only written, from afar.

What the network does is ``Send``: put data into the memory of one rank and then set a word beside them. Nobody reads another node, so no
read of memory that a device wrote just before has to be made safe, and no rank depends on what another one *does* there: whoever needs
something waits for a word in its own node. Inside a node everything is as in :mod:`primus_odc.primitives.protocol`, whose states and
calls this class keeps. Gradients add up locally (``local`` mode, the DEFER of multi-node work) and leave during the last backward.

* **Parameters.** As the end of publish an owner *lands* its shards in every other node that needs them, on one rank of it (the *home* of
  the copy: :meth:`Nodes.landing` deals the owners out evenly). All ranks of that node gather from the copy, any number of times.
* **Gradients.** In each node, every shard has a *reducer*, which adds what the ranks of the node have for it to what it has itself, in
  place: its own row of the shard, which nobody else reads before, becomes the node's *partial*. It sends the partial into the staging slot
  that its node has in every other node that owns the shard, once per node and shard: at the reducer there, which is an owner. Owners add
  the partials of all nodes, their own among them, in the order of nodes, so all replicas of a shard add the same numbers in the same order.

Words beside those of the one-level protocol, which keep their meaning inside a node (``home``: whose memory holds the word):

===================  ========  =================  ==================================================================================
word                 writer    home               meaning
===================  ========  =================  ==================================================================================
``landed[s, g]``     owner     home of the copy   group g of the shard in slot s is the one of epoch k
``partial[j, g]``    reducer   reducer            ``2k + 1``: this node's partial of shard j is complete; ``2k``: no rank here has any
``arrived[n, g]``    reducer   reducer there      ``2k + 1``: the partial of node n lies in its staging slot; ``2k``: node n has none
``node_done[n]``     contact   the rank told      every rank of node n has ``done >= k``
``node_closed[n]``   contact   the rank told      every rank of node n has detached
``far_normed[s]``    peer      home of its copy   number of scalar exchanges the peer in slot s has entered; its number lies there
===================  ========  =================  ==================================================================================

In every node each rank of another node has one *contact* that tells it how far the node is; it looks at the words of its own node when it
publishes, so one call of publish in every rank takes the place of a barrier.

Invariants (the numbers of the one-level protocol hold inside a node):

A. ``done = k`` says more here: everything of epoch k that lands in this rank's memory has landed, the rank will read nothing of epoch k
   any more, neither copies nor staging slots, and what it sent of k to owners has been added, once *all* ranks say so.
B. publish(k + 1) waits until every rank has ``done >= k``: its own node's by their words, the other nodes' by ``node_done``. Only then does
   an owner overwrite its published shards and send the next ones over the fan-out copies of epoch k.
C. A staging slot of epoch k is overwritten by a reducer in settle(k + 1), hence after its publish(k + 1), hence after ``done = k`` of all
   who read it. The same holds for the partial it is sent from: the reducer's row changes in microbatches of k + 1 only.
D. A reducer adds in place from ``ready`` of all its mates on; mates read other rows of its buffer than those it reduces.
E. A word is set no earlier than the data it covers are visible where the word lies. What one rank sends to one rank under words of one
   name arrives in order; more is not relied on, since landings and sums go through different streams.

No deadlock: a send waits for nobody. In settle the reduction of group g waits for ``ready`` of mates only, which they store in backward or
on entering settle; the sum of group g waits for reductions of g elsewhere, and each rank reduces g before it sums g, groups in one order.
``node_done`` needs every rank to enter publish(k + 1), for which settle(k) suffices. A rank with no microbatch, or an epoch ahead or
behind, has no other duty than these calls: copies land in its memory without it. Evaluation between two epochs only reads copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from primus_odc.primitives.effects import Do, Effect, ReadWord, Send, Steps, Store, Wait
from primus_odc.primitives.nodes import Nodes
from primus_odc.primitives.protocol import RankProtocol, State
from primus_odc.primitives.topology import DataPlane, Topology


class NodePlane(DataPlane, Protocol):
    """What moves the bytes beyond :class:`DataPlane`. ``read_shard`` reads a fan-out copy where the owner is in another node, and ``pull``
    the partial of the node whose reducer it names."""

    def land_shard(self, home: int, slot: int, group: int, epoch: int) -> None:
        """Put this rank's published shard into fan-out slot ``slot`` of ``home``."""

    def add_in_node(self, source: int, shard: int, group: int, epoch: int) -> None:
        """What ``source`` has for ``shard`` belongs to the partial this rank makes."""

    def complete_partial(self, shard: int, group: int, epoch: int) -> None:
        """The partial is the sum of what was added; write it over this rank's own row."""

    def send_partial(self, reducer: int, shard: int, group: int, epoch: int) -> None:
        """Put the partial into the staging slot that this node has at ``reducer``, which is in another node."""

    def send_scalar(self, home: int, slot: int, parity: int) -> None:
        """Put this rank's number of the current exchange beside fan-out slot ``slot`` of ``home``."""


class TwoLevelProtocol(RankProtocol):
    """One rank's side of the protocol across nodes (``topology.nodes`` is not None), in ``local`` mode."""

    plane: NodePlane

    def __init__(self, topology: Topology, plane: NodePlane) -> None:
        super().__init__(topology, plane, "local")
        assert topology.nodes is not None
        self.n: Nodes = topology.nodes
        self.node = self.n.node_of[topology.rank]
        self._others = [(self.node + i) % self.n.count for i in range(1, self.n.count)]
        self._told = self.n.told_by(topology.rank)
        lands = [self.n.landing(topology.rank, node) for node in self._others]
        self._homes = [home for home in lands if home is not None]
        landings = self.n.landings(self.node)
        self._lands_here = [(owner, slot) for owner, (home, slot) in landings.items() if home == topology.rank]
        self._shard = topology.peers.index(topology.rank)
        self._duties = [(shard, self._destinations(shard)) for shard in self.n.reduced_by(topology.rank)]
        self._partials: dict[int, bool] = {}

    def _destinations(self, shard: int) -> list[int]:
        elsewhere = [node for node in self.n.owning_nodes(shard) if node != self.node]
        return self.n.from_next_node(self.node, [self.n.reducer(node, shard) for node in elsewhere])

    def land(self) -> Steps:
        for g in range(len(self.t.groups)):
            for home, slot in self._homes:
                yield Send(home, "landed", self._word(slot, g), self.epoch, partial(self.plane.land_shard, home, slot, g, self.epoch))

    def gather(self, group: int, into: Any, *, own: bool = False) -> Steps:
        k, operation = self.epoch, f"gather of group {self.t.groups[group]} (epoch {self.epoch})"
        for effect in super().gather(group, into, own=own):
            if isinstance(effect, Wait) and self.n.node_of[effect.rank] != self.node:
                home, slot = self.n.landings(self.node)[effect.rank]
                yield Wait(effect.rank, "landed", self._word(slot, group), k, operation, home)
            else:
                yield effect

    def settle(self, read_word: ReadWord) -> Steps:
        self._require("settle", State.ACTIVE)
        for g in range(len(self.t.groups)):
            yield from self.declare(g)
        yield Do(self.plane.reshard)  # the optimizer works on the sharded parameters
        # Groups complete in backward order. While the partial of one is under way, that of the next is made.
        order = list(reversed(range(len(self.t.groups))))
        for reduced, summed in zip([*order, None], [None, *order], strict=True):
            if reduced is not None:
                yield from self._reduce(reduced, read_word)
            if summed is not None:
                yield from self._sum(summed, read_word)
        yield from self._finish()
        self.state = State.SETTLED

    def exchange(self, put: Callable[[int], None], operation: str) -> Iterator[Effect]:
        self._exchanges += 1
        n = self._exchanges
        in_vain = self._unless_begun("a gradient norm", self.t.peers)
        yield Do(lambda: put(n % 2))
        yield Store("normed", 0, n)
        for home, slot in self._homes:
            yield Send(home, "far_normed", slot, n, partial(self.plane.send_scalar, home, slot, n % 2))
        for r in self.t.peers:
            if self.n.node_of[r] != self.node:
                home, slot = self.n.landings(self.node)[r]
                yield Wait(r, "far_normed", slot, n, operation, home, in_vain)
            elif r != self.t.rank:
                yield Wait(r, "normed", 0, n, operation, in_vain=in_vain)

    def scalar_of(self, peer: int, parity: int) -> tuple[int, str, int]:
        if self.n.node_of[peer] == self.node:
            return super().scalar_of(peer, parity)
        home, slot = self.n.landings(self.node)[peer]
        return home, "far_scalar", 2 * slot + parity

    def _reduce(self, group: int, read_word: ReadWord) -> Steps:
        """Make this node's partials of the shards this rank reduces, and send them to the nodes that own them."""
        k, operation = self.epoch, f"settle of group {self.t.groups[group]} (epoch {self.epoch})"
        sources = []
        for mate in self._rotated(self.t.near):
            if mate == self.t.rank:
                has_data = self.has_data[group]
            else:
                yield Wait(mate, "ready", group, 2 * k, operation)
                has_data = read_word(mate, "ready", group) == 2 * k + 1
            if has_data:
                sources.append(mate)
        value = 2 * k + bool(sources)
        for shard, _ in self._duties:
            for source in sources:
                yield Do(partial(self.plane.add_in_node, source, shard, group, k))
            if sources:
                yield Do(partial(self.plane.complete_partial, shard, group, k))
            if len(self.n.owners_in(self.node, shard)) > 1:
                yield Store("partial", self._word(shard, group), value)
        for shard, destinations in self._duties:  # in a row: they leave together
            for reducer in destinations:
                put = partial(self.plane.send_partial, reducer, shard, group, k) if sources else None
                yield Send(reducer, "arrived", self._word(self.node, group), value, put)
        self._partials[group] = bool(sources)

    def _sum(self, group: int, read_word: ReadWord) -> Steps:
        """Add the partials of all nodes for the shard this rank owns, in the order of nodes, and deliver the sum."""
        k, operation = self.epoch, f"settle of group {self.t.groups[group]} (epoch {self.epoch})"
        here = self.n.reducer(self.node, self._shard)
        for node in range(self.n.count):
            reducer = self.n.reducer(node, self._shard)
            if reducer == self.t.rank:
                has_data = self._partials[group]
            else:
                word, row = ("partial", self._shard) if node == self.node else ("arrived", node)
                yield Wait(reducer, word, self._word(row, group), 2 * k, operation, here)
                has_data = read_word(here, word, self._word(row, group)) == 2 * k + 1
            if has_data:
                yield Do(partial(self.plane.pull, reducer, group, k))
        yield Do(partial(self.plane.deliver, group))

    def _finish(self) -> Steps:
        last = len(self.t.groups) - 1
        for owner, slot in self._lands_here:
            yield Wait(owner, "landed", self._word(slot, last), self.epoch, f"settle of all groups (epoch {self.epoch})", self.t.rank)
        yield from super()._finish()

    def _until_all(self, word: str, at_least: int, operation: str, in_vain: Callable[[ReadWord], str] | None = None) -> Steps:
        for r in self._rotated(self.t.near):
            if r != self.t.rank:
                yield Wait(r, word, 0, at_least, operation, in_vain=in_vain)
        for r in self._told:
            yield Send(r, f"node_{word}", self.node, at_least)
        for node in self._others:
            yield Wait(self.n.contact(node, self.t.rank), f"node_{word}", node, at_least, operation, self.t.rank, in_vain)

    def _word(self, row: int, group: int) -> int:
        return row * len(self.t.groups) + group
