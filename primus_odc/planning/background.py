"""Make plans ahead of the steps that need them.

One thread calls ``make(step)`` for consecutive steps and stays at most ``depth`` finished plans ahead, so a step finds its plan made as
long as planning is faster than training on average. ``make`` runs in that thread only, one call at a time and in the order of the steps: it
may draw from an iterator.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from primus_odc.errors import PlanError, ProtocolError

T = TypeVar("T")


class PlanAhead(Generic[T]):
    """Plans of consecutive steps, made in a background thread; a context manager that closes at its end.

    Args:
        make: makes the plan of one step. What it raises, ``get`` raises for that step, and no later plan is made.
        first_step: step of the first plan.
        depth: finished plans to keep ready, at least 1.
        timeout_s: longest wait of ``get`` for a plan, and of ``close`` for a plan that is being made, in seconds.
    """

    def __init__(self, make: Callable[[int], T], first_step: int, depth: int = 2, timeout_s: float = 600.0) -> None:
        if depth < 1:
            raise PlanError(f"depth is {depth}; at least one plan must be made ahead")
        self._make = make
        self._next_step = first_step
        self._depth = depth
        self._timeout_s = timeout_s
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # A daemon, because a make that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="primus-odc-plan", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                plan = self._make(step)
            except BaseException as error:  # noqa: BLE001 - get() raises it in the thread that needs the plan
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(plan)
                self._changed.notify_all()
            step += 1

    def get(self, step: int) -> T:
        """The plan of ``step``; steps are taken one after the other.

        Raises:
            PlanError: the plan was not made within ``timeout_s``.
            ProtocolError: ``step`` is not the next one, or ``close`` was called.
            Exception: whatever ``make`` raised for this step, with its traceback.
        """
        with self._changed:
            if step != self._next_step:
                raise ProtocolError(f"plan of step {step} asked for, but step {self._next_step} is next; plans are taken in order")
            arrived = self._changed.wait_for(lambda: self._closed or self._ready or self._failure, self._timeout_s)
            if self._closed:
                raise ProtocolError(f"plan of step {step} asked for after close()")
            if not arrived:
                raise PlanError(f"the plan of step {step} was not made within {self._timeout_s:g} s; raise timeout_s or speed planning up")
            if not self._ready:
                assert self._failure is not None
                raise self._failure
            self._next_step += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Make no further plan and wait for one being made to end; may be called twice.

        Raises:
            PlanError: it did not end within ``timeout_s``. Its thread does not keep the process alive.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise PlanError(f"the plan being made did not end within {self._timeout_s:g} s after close()")

    def __enter__(self) -> PlanAhead[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
