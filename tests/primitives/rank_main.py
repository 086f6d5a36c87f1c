"""What an engine does on one rank, in terms of the protocol: the program that simulated ranks run."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from primus_odc.primitives.effects import Do, Effect, Store
from primus_odc.primitives.protocol import RankProtocol
from tests.primitives.scenario import Step, Violation

if TYPE_CHECKING:
    from tests.primitives.simulation import SimPlane, World


def rank_main(world: World, protocol: RankProtocol, plane: SimPlane, steps: Iterable[Step]) -> Generator[Effect, None, None]:
    """The steps of ``make_steps`` on the rank of ``plane``."""
    scenario, rank = world.scenario, plane.rank
    for number, step in enumerate(steps, 1):
        yield from protocol.publish()
        yield from protocol.land()
        assert protocol.epoch == number
        for n in range(step.evaluations[rank]):
            yield from unshard(protocol, plane, (rank + n) % scenario.groups, step.resident)
        if step.used is None:
            continue
        protocol.begin()
        yield Store("begun", 0, protocol.epoch)
        mine = step.used[rank]
        for microbatch, groups in enumerate(mine):
            for group in groups:
                yield from unshard(protocol, plane, group, step.resident)
            for group in reversed(range(scenario.groups)):
                if group in groups:
                    yield from unshard(protocol, plane, group, step.resident)
                    yield from reduce(world, protocol, rank, group, microbatch)
                if step.early[rank] and microbatch == len(mine) - 1:
                    yield from protocol.declare(group)
                    if protocol.mode == "owner":
                        yield from protocol.deliver_complete(world.reader(rank))
        yield from protocol.settle(world.reader(rank))
        for _ in range(step.exchanges):
            yield from exchange(world, protocol, rank)
    yield from protocol.close()


def unshard(protocol: RankProtocol, plane: SimPlane, group: int, resident: bool) -> Generator[Effect, None, None]:
    """Use a group's parameters: gather them unless they are still there from this epoch."""
    if resident and group in plane.unsharded:
        if plane.unsharded[group] != protocol.epoch:
            raise Violation(f"rank {plane.rank}: computes with group {group} of epoch {plane.unsharded[group]} in epoch {protocol.epoch}")
        return
    received: list[int] = []
    yield from protocol.gather(group, received.append)
    if sorted([*received, plane.rank]) != sorted(protocol.t.peers):
        raise Violation(f"rank {plane.rank}: gather of group {group} brought the shards of {received}")
    plane.unsharded[group] = protocol.epoch


def reduce(world: World, protocol: RankProtocol, rank: int, group: int, microbatch: int) -> Generator[Effect, None, None]:
    """Gradients of one group from one backward, for every shard; in owner mode to the shard's owner in the own replica."""
    scenario = world.scenario
    tokens = [(rank, protocol.epoch, group, microbatch, shard) for shard in range(scenario.shards)]
    if protocol.mode == "local":
        yield from protocol.reduce_local(group, tokens)
    else:
        yield from protocol.reduce_owner(group, list(zip(protocol.t.peers, tokens, strict=True)), world.read)


def exchange(world: World, protocol: RankProtocol, rank: int) -> Generator[Effect, None, None]:
    """All ranks of the shard group must read the number that each put in for this very exchange."""
    places: list[int] = []
    number = protocol._exchanges + 1

    def put(parity: int) -> None:
        places.append(world.parities(parity))
        world.scalars[(rank, "scalar", places[0])] = number

    yield from protocol.exchange(put, "norm")
    for peer in protocol.t.peers:
        yield Do(lambda: None)  # others may run between two reads
        found = world.scalars.get(protocol.scalar_of(peer, places[0]))
        if found != number:
            raise Violation(f"rank {rank}: exchange {number} reads {found} from rank {peer}")
