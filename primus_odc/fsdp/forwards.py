"""What is put in order around every forward of the root module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle


class ForwardHooks:
    """Two hooks on the root, behind FSDP2's own:

    * Before a forward under HSDP: no all-reduce of FSDP2's, once more. A user's ``set_requires_gradient_sync(True)`` switches it on, and a
      collective inside backward hangs where ranks have different counts.
    * After a forward outside a minibatch, an evaluation: all parameters are sharded again. FSDP2 leaves the root unsharded, with resident
      parameters everything; ``model.zero_grad()`` would then find unsharded parameters and leave the ``.grad`` of the sharded ones.
      And edits are looked for afresh, since parameters may be edited before the next one: a copy into a reference model, averaged weights.
    """

    def __init__(self, root: nn.Module, hsdp: bool, in_minibatch: Callable[[], bool], *after: Callable[[], None]) -> None:
        """``after``: called in turn after a forward outside a minibatch."""
        self._in_minibatch = in_minibatch
        self._after_evaluation = after
        self.handles: list[RemovableHandle] = [root.register_forward_hook(self._after)]
        if hsdp:
            self.handles.append(root.register_forward_pre_hook(self._before))

    @staticmethod
    def _before(root: nn.Module, args: Any) -> None:
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(False)

    def _after(self, root: nn.Module, args: Any, output: Any) -> None:
        if not self._in_minibatch():
            for call in self._after_evaluation:
                call()
