"""Python's garbage collector, kept out of training steps.

A full collection stalls a rank for as long as it takes to visit every object of torch and the model, and in a collective all ranks wait
for it. What is alive when training starts is set aside, the collector is switched off, and the trainer collects between two steps. What the
first step leaves behind, the optimizer's state above all, is set aside too: what is collected later is small.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_between_steps() -> Iterator[Callable[[], int]]:
    """Yields the function to call between two steps; afterwards the collector is as before."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    steps = 0

    def collect() -> int:
        nonlocal steps
        steps += 1
        found = gc.collect()
        if steps == 1:
            gc.freeze()
        return found

    try:
        yield collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
