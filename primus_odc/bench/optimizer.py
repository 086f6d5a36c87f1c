"""AdamW on the ranks' own parts of the parameters.

torch's AdamW on DTensors spends milliseconds of host time on the DTensors of a step. Under collectives that is hidden behind backward; on
demand a rank that waited for the last one would show it. Here the step works on the local tensors, the same arithmetic in every arm,
and optionally as a CUDA graph where gradients lie in the same memory every step, as they do on demand.

The learning rate is 0: weights stay as they are, so that all arms see the same ones and their losses can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from primus_odc.errors import ProtocolError
from primus_odc.megatron.optimizer import local

_WARM_UP_STEPS = 3


class LocalAdamW:
    """Fused AdamW over ``parameters``; with ``graph`` replayed as a CUDA graph after a few steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, graph: bool = False) -> None:
        self._parameters = list(parameters)
        self._capture = graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[int] = []
        self._steps = 0
        self._own: list[torch.Tensor] = []
        self._optimizer: torch.optim.AdamW | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One step with the parameters' present gradients; every parameter has one.

        Raises:
            ProtocolError: the graph was captured with gradients in other memory.
        """
        if self._optimizer is None:
            # Not before the first step: FSDP2 may move the shards until the first forward.
            self._own = [local(parameter) for parameter in self._parameters]
            self._optimizer = make_adamw(self._own, capturable=self._capture)
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if self._graph is not None:
            if [gradient.data_ptr() for gradient in gradients] != self._places:
                raise ProtocolError("the optimizer's CUDA graph was captured with gradients elsewhere in memory; use --optimizer local")
            self._graph.replay()
            return
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient
        if self._capture and self._steps >= _WARM_UP_STEPS:
            self._places = [gradient.data_ptr() for gradient in gradients]
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, an engine's for one, may go on calling CUDA meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._optimizer.step()
            self._graph.replay()  # capturing runs nothing
            return
        self._optimizer.step()
        self._steps += 1

    def zero_grad(self) -> None:
        """The parameters have no gradients afterwards."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._graph is None:
            for own in self._own:
                own.grad = None

    def state_bytes(self) -> int:
        """Memory of the moments."""
        return optimizer_bytes(self._optimizer)


class DTensorAdamW:
    """torch's own AdamW on the DTensors, as a training script has it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = make_adamw(list(parameters))

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Memory of the moments."""
        return optimizer_bytes(self._optimizer)


def make_adamw(parameters: Sequence[torch.Tensor], *, capturable: bool = False) -> torch.optim.AdamW:
    """Fused AdamW that leaves the weights as they are."""
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True, capturable=capturable)


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Memory of all tensors in an optimizer's state on this rank."""
    states: list[dict[str, Any]] = list(optimizer.state.values()) if optimizer is not None else []
    return sum(local(value).nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
