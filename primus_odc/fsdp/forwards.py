"""What is put in order after every forward of the root module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardHooks:
    """A hook on the root, behind FSDP2's own.

    After a forward outside a minibatch, an evaluation, all parameters are sharded again. FSDP2 leaves the root unsharded, with resident
    parameters everything; ``model.zero_grad()`` would then find unsharded parameters and leave the ``.grad`` of the sharded ones. And edits
    are looked for afresh, since parameters may be edited before the next one: a copy into a reference model, averaged weights.
    """

    def __init__(self, root: nn.Module, in_minibatch: Callable[[], bool], *after: Callable[[], None]) -> None:
        """``after``: called in turn after a forward outside a minibatch."""
        self._in_minibatch = in_minibatch
        self._after_evaluation = after
        self.handles: list[RemovableHandle] = [root.register_forward_hook(self._after)]

    def _after(self, root: nn.Module, args: Any, output: Any) -> None:
        if not self._in_minibatch():
            for call in self._after_evaluation:
                call()
