"""The data plane of :mod:`tests.primitives.simulation`: cells that are torn while they are written, tokens instead of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.primitives.scenario import Violation

if TYPE_CHECKING:
    from tests.primitives.simulation import World

TORN = "torn"

Token = tuple[int, int, int, int, int]
Finish = Callable[[], None]


class SimPlane:
    """The data plane of one rank. Each method performs its first half and leaves the second in ``finish``."""

    def __init__(self, world: World, rank: int) -> None:
        self.w, self.rank = world, rank
        self.shard_index = rank - world.scenario.peers(rank).start
        self.finish: Finish | None = None
        self.unsharded: dict[int, int] = {}
        self.sums: list[list[Token]] = [[] for _ in range(world.scenario.groups)]
        self.fresh = [True] * world.scenario.groups
        self.own: list[tuple[int, list[Token]]] = [(0, [])] * world.scenario.groups
        self.kept: dict[tuple[int, int], list[Token]] = {}
        self.travelling: dict[tuple[int, int], list[Token]] = {}

    def _write(self, cells: dict[Any, Any], key: Any, value: Any) -> None:
        cells[key] = TORN
        self.finish = lambda: cells.__setitem__(key, value)

    def _read(self, cells: dict[Any, Any], key: Any, what: str, then: Callable[[Any], None]) -> None:
        before = cells.get(key)

        def finish() -> None:
            after = cells.get(key)
            if before is TORN or before != after:
                raise Violation(f"rank {self.rank}: torn read of {what}: {before} then {after}")
            then(after)

        self.finish = finish

    def reshard(self) -> None:
        self.unsharded.clear()

    def finish_pushes(self) -> None:
        """Pushes here are over when they are made."""

    def finish_transfers(self) -> None:
        """Transfers here are over when they are made."""

    def publish_shard(self, group: int, epoch: int) -> None:
        self._write(self.w.shards, (self.rank, group), epoch)

    def read_shard(self, owner: int, group: int, epoch: int, into: Any) -> None:
        def then(found: Any) -> None:
            if found != epoch:
                raise Violation(f"rank {self.rank}: gather of group {group} from {owner} in epoch {epoch} found epoch {found}")
            into(owner)

        self._read(self.w.shards, (owner, group), f"shard {group} of {owner}", then)

    def accumulate(self, group: int, contribution: list[Token]) -> None:
        tokens, complete = ([], False) if self.fresh[group] else self.w.buffers[(self.rank, group)]
        self.fresh[group] = False
        if complete:
            raise Violation(f"rank {self.rank}: accumulates into a completed buffer of group {group}")
        self._write(self.w.buffers, (self.rank, group), (tokens + contribution, False))

    def complete(self, group: int, epoch: int) -> None:
        if self.w.scenario.mode == "owner":
            mine, own = self.own[group]
            total = [*self._arrived(group, epoch), *(own if mine == epoch else [])]
            self._write(self.w.accumulators, (self.rank, group), (epoch, total))
            return
        tokens, _ = self.w.buffers[(self.rank, group)]
        self.fresh[group] = True
        self._write(self.w.buffers, (self.rank, group), (tokens, True))

    def pull(self, source: int, group: int, epoch: int) -> None:
        def then(found: Any) -> None:
            if self.w.scenario.mode == "owner":
                sent, tokens = found or (0, [])
                if sent != epoch:
                    raise Violation(f"rank {self.rank}: the accumulator {group} of {source} is of epoch {sent}, not {epoch}")
                self.sums[group] += tokens
                return
            tokens, complete = found or ([], False)
            if not complete:
                raise Violation(f"rank {self.rank}: pulls group {group} of {source} in epoch {epoch} before it is complete")
            self.sums[group] += [t for t in tokens if t[4] == self.shard_index]

        cells = self.w.accumulators if self.w.scenario.mode == "owner" else self.w.buffers
        self._read(cells, (source, group), f"gradients {group} of {source}", then)

    def _arrived(self, group: int, epoch: int) -> list[Token]:
        found = self.w.accumulators.get((self.rank, group), (0, []))
        if found is TORN:
            raise Violation(f"rank {self.rank}: a piece of group {group} arrives while its accumulator is completed")
        sent, tokens = found
        return tokens if sent == epoch else []

    def _add(self, group: int, epoch: int, piece: Token) -> None:
        """Arrivals are added one after the other, by one thread; a reader elsewhere is not locked out."""
        self.w.accumulators[(self.rank, group)] = (epoch, [*self._arrived(group, epoch), piece])

    def push(self, owner: int, slot: int, group: int, epoch: int, piece: Token) -> None:
        self._write(self.w.rings, (owner, self.rank, slot), (epoch, group, piece))

    def keep(self, owner: int, entry: int, group: int, piece: Token) -> None:
        self.kept.setdefault((owner, entry), []).append(piece)

    def kept_parts(self, group: int) -> int:
        return 1 + group % 2

    def push_kept(self, owner: int, slot: int, group: int, epoch: int, entry: int, part: int) -> None:
        """Of two parts the first carries the first token, the second the others of that moment."""
        tokens, parts = self.kept[(owner, entry)], self.kept_parts(group)
        if part == 0:
            self.travelling[(owner, entry)] = list(tokens)
        sent = self.travelling[(owner, entry)]
        if part == parts - 1:
            del self.kept[(owner, entry)], self.travelling[(owner, entry)]
        self._write(self.w.rings, (owner, self.rank, slot), (epoch, group, *(sent if parts == 1 else sent[1:] if part else sent[:1])))

    def add_own(self, group: int, epoch: int, piece: Token) -> None:
        mine, tokens = self.own[group]
        self.own[group] = (epoch, [*(tokens if mine == epoch else []), piece])

    def add_arrival(self, source: int, slot: int, epoch: int) -> None:
        def then(found: Any) -> None:
            sent, group, *pieces = found or (0, 0)
            if sent != epoch:
                raise Violation(f"rank {self.rank}: a piece of epoch {sent} from {source} is added in epoch {epoch}")
            for piece in pieces:
                self._add(group, epoch, piece)

        self._read(self.w.rings, (self.rank, source, slot), f"slot {slot} of {source} at {self.rank}", then)

    def deliver(self, group: int) -> None:
        found = list(self.sums[group])

        def finish() -> None:
            if self.sums[group] != found:
                raise Violation(f"rank {self.rank}: the sum of group {group} changes while it is delivered")
            self.w.delivered.append((self.rank, group, Counter(found)))
            self.sums[group] = []

        self.finish = finish
