"""What the ranks of a simulated job do, chosen from a seed before they start."""

from __future__ import annotations

import random
from dataclasses import dataclass


class Violation(Exception):
    """The protocol let a rank see or lose something it must not."""


@dataclass(frozen=True)
class Scenario:
    """What the ranks do. Everything per epoch is chosen from ``seed`` before the ranks start; the schedule has its own seed.

    ``replicas`` shard groups of ``world_size // replicas`` ranks (HSDP). Counts of microbatches are 0 to ``max_count`` per rank.
    """

    world_size: int
    mode: str
    replicas: int = 1
    groups: int = 2
    slots: int = 2
    epochs: int = 3
    max_count: int = 3
    seed: int = 0

    @property
    def shards(self) -> int:
        return self.world_size // self.replicas

    def peers(self, rank: int) -> range:
        start = rank // self.shards * self.shards
        return range(start, start + self.shards)

    def owners(self, shard: int) -> list[int]:
        """The ranks that own ``shard``, one in each replica."""
        return [shard + replica * self.shards for replica in range(self.replicas)]


@dataclass(frozen=True)
class Step:
    """One epoch of a job: ``used[rank]`` lists for each microbatch the groups it uses; ``None`` is a publish without a minibatch."""

    evaluations: tuple[int, ...]
    used: tuple[tuple[tuple[int, ...], ...], ...] | None
    early: tuple[bool, ...]
    exchanges: int
    resident: bool


def make_steps(scenario: Scenario) -> list[Step]:
    """The job: in about a third of the epochs some rank runs nothing, in a quarter nobody does (an extra publish)."""
    rng, ranks = random.Random(scenario.seed), range(scenario.world_size)
    steps = []
    for _ in range(scenario.epochs):
        used: list[tuple[tuple[int, ...], ...]] = []
        for _ in ranks:
            skipped = rng.choice((None, None, *range(scenario.groups)))
            mine = [g for g in range(scenario.groups) if g != skipped]
            used.append(tuple(tuple(g for g in mine if rng.random() < 0.8) for _ in range(rng.randint(0, scenario.max_count))))
        steps.append(
            Step(
                evaluations=tuple(rng.choice((0, 0, 1, 2)) for _ in ranks),
                used=None if rng.random() < 0.25 else tuple(used),
                early=tuple(rng.random() < 0.7 for _ in ranks),
                exchanges=rng.randint(0, 2),
                resident=rng.random() < 0.3,
            )
        )
    return steps
