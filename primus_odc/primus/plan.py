"""What the loop has to know of a step's minibatch, whatever its microbatches are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class StepPlan:
    """One step's minibatch; all but the microbatches themselves is the same on every rank."""

    step: int
    """Iterations of the run before this one, skipped ones included."""
    counts: tuple[int, ...]
    """[rank] microbatches to run, padding included."""
    tokens: int
    """Over all ranks, padding not counted."""
    target_tokens: int | None
    """Targets over all ranks, where the plan knows them."""
    samples: int
    """Over all ranks."""
    digest: str
    """Equal on two ranks exactly if they hold the same plan of the same samples."""


class MinibatchSource(Protocol):
    """The data of a run; also the iterator from which the forward step takes the microbatches of the step that was begun."""

    @property
    def identity(self) -> dict[str, object]:
        """What identifies the data; equal for two runs exactly if they train on the same samples."""

    def begin(self, step: int, consumed_samples: int) -> StepPlan:
        """Plan ``step`` and make its microbatches of this rank the next ones; every rank calls it, steps in order, some left out."""

    def close(self) -> None:
        """End background work; may be called twice."""

    def __next__(self) -> Any:
        """This rank's next microbatch."""
