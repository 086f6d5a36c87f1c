"""When is a group's gradient of this minibatch complete? As early as it is certain, never by counting communication calls.

Chunked losses, unused units, two forwards before one backward and recomputation all change how often FSDP2 gathers and reduces. What
is watched instead: a *microbatch* is one forward of the root module with gradients enabled; after the announced number of them (or
after ``last_microbatch()``) the minibatch is *closing*, and once the backward of the root's output runs, a group is complete when every
forward of its modules has been followed by a reduction and another group has been reduced since. (Before that backward, heads may run
forward and backward in turn, chunk by chunk.) What cannot be decided that way is complete at settle. If the guess is wrong after all, the
late reduction is an error of the protocol, never a lost gradient.

A backward that raises is noticed too, even where the script catches the exception and never calls the engine again: part of its gradients
may be on their way, so the minibatch can neither be completed nor begun again, and the other ranks are told at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves  # not public, but FSDP2's own in all tested versions
from torch.utils.hooks import RemovableHandle

from primus_odc.errors import OdcError, ProtocolError
from primus_odc.fsdp.probe import Unit


class MicrobatchTracker:
    """Counts forwards of the root and of every unit, and calls ``declare(group)`` when a group is complete.

    ``guard(operation)`` is entered around what may fail inside a forward or backward, so that the other ranks learn of it.

    Attributes:
        announced: this rank's number of microbatches in the present minibatch; None where it was not said.
        microbatches: how many have begun and were not given up. One that the next finds without an output has raised, and the script went
            on.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        declare: Callable[[int], None],
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._declare = declare
        self._guard = guard
        self.announced: int | None = None
        self._active = False
        self._closing = False
        self._in_backward = False
        self._in_forward = False
        self._given_up = 0
        self._watched: Callable[[], _Backward | None] = lambda: None
        self._pending = [0] * len(units)
        self._reduced: set[int] = set()
        self.microbatches = 0
        self.handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(self._root_forward),
            root.register_forward_hook(self._root_output),
        ]
        for g, unit in enumerate(units):
            self.handles += [m.register_forward_pre_hook(self._unit_forward(g)) for m in unit.modules]  # type: ignore[attr-defined]
            self.handles += [m.register_forward_hook(self._unit_output) for m in unit.modules if m is not root]  # type: ignore[attr-defined]

    def begin(self, num_microbatches: int | None) -> None:
        """A minibatch begins; ``num_microbatches`` is this rank's own count if it is known."""
        self.announced = num_microbatches
        self._active = True
        self._closing = self._in_backward = self._in_forward = False
        self._pending = [0] * len(self._pending)
        self._reduced.clear()
        self.microbatches = self._given_up = 0

    def end(self) -> None:
        """The minibatch is settled; forwards until the next :meth:`begin` are evaluation.

        Raises:
            ProtocolError: fewer microbatches ran than were announced.
        """
        self._active = False
        # One that was announced may have been given up, or tried again.
        if self.announced is not None and not self.microbatches <= self.announced <= self.microbatches + self._given_up:
            raise ProtocolError(
                f"settle() after {self.microbatches} microbatches where begin_minibatch(num_microbatches={self.announced}) announced "
                f"{self.announced}; a microbatch is one forward of the root module with gradients enabled (pass None if yours is not)"
            )

    def close(self) -> None:
        """The microbatch that begins now is the last."""
        self._closing = True
        self._reduced.clear()  # only what is reduced from here on can be known to be complete

    def reduced(self, group: int) -> None:
        """``group`` has been reduced once more."""
        self._pending[group] -= 1
        self._reduced.add(group)
        if self._closing and self._in_backward:
            for g in sorted(self._reduced - {group}):
                if self._pending[g] <= 0:
                    self._declare(g)
                    self._reduced.remove(g)

    def _root_forward(self, module: nn.Module, args: Any) -> None:
        self._in_backward = False
        if not (self._active and torch.is_grad_enabled()):
            return
        with self._guard("forward of all groups"):
            if self._in_forward:
                self._given_up += 1
            else:
                self.microbatches += 1
            self._in_forward = True
            if self.announced is not None and self.microbatches > self.announced:
                raise ProtocolError(
                    f"microbatch {self.microbatches} begins where begin_minibatch(num_microbatches={self.announced}) announced "
                    f"{self.announced}; a microbatch is one forward of the root module with gradients enabled (pass None if yours is not)"
                )
        if self.microbatches == self.announced:
            self.close()

    def _root_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._active and torch.is_grad_enabled():
            self._in_forward = False
            _on_gradient_of(output, self._backward_began)

    def _unit_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # A chunked loss runs the head's backward before, and outside, that of the root's output.
        if self._active and torch.is_grad_enabled():
            _on_gradient_of(output, self._watch_backward)

    def _backward_began(self, gradient: torch.Tensor) -> None:
        self._in_backward = True
        self._watch_backward(gradient)

    def _watch_backward(self, gradient: torch.Tensor) -> None:
        if self._active and self._watched() is None:
            backward = _Backward(self._backward_failed)
            self._watched = weakref.ref(backward)
            # Not public, but what FSDP2 itself is called by at the end of backward in all tested versions; there is no public way.
            torch.autograd.Variable._execution_engine.queue_callback(backward)

    def _backward_failed(self) -> None:
        # Nothing can be raised where objects are dropped: the script has its own exception, and every later call of the engine tells this.
        with suppress(OdcError), self._guard("backward of all groups"):
            raise ProtocolError(
                f"an exception was raised inside the backward pass of microbatch {self.microbatches}; part of its gradients may be in the "
                "sums of this minibatch, which therefore cannot be completed"
            )

    def _unit_forward(self, group: int) -> Callable[[nn.Module, Any], None]:
        def forward(module: nn.Module, args: Any) -> None:
            # A forward inside backward is a recomputation of one already counted. One without gradients inside the root's with them may be
            # the first of a reentrant recomputation; if it is not, the group is complete at settle.
            if self._active and (torch.is_grad_enabled() or self._in_forward) and not self._in_backward:
                self._pending[group] += 1

        return forward


class _Backward:
    """What autograd holds while it runs one backward pass: it calls it at the end, and drops it without a call where the pass failed."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._over = False

    def __call__(self) -> None:
        self._over = True

    def __del__(self) -> None:
        if not self._over:
            self._failed()


def _on_gradient_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """``hook`` runs when backward reaches any tensor of a module's output, in whatever container pytree knows; so FSDP2 finds them too."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
