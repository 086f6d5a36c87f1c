"""On-demand communication behind the interface Megatron's training loop speaks to its data-parallel wrappers.

Per optimizer step that loop calls ``zero_grad_buffer()``, any number of forward-backward passes, ``finish_grad_sync()`` and, with
``calculate_per_token_loss``, ``scale_gradients(1 / tokens of all ranks)``. Megatron's own FSDP2 wrapper leaves the last two empty: the loss
is then a sum, FSDP2 takes the mean over ranks, and gradients come out tokens / ranks times too large without a word.

Here gradients are always summed over ranks (factor 1.0) and normalised exactly once, by what Megatron's loss contract leaves undone:

=============================  ==========================================  =======================================================
``calculate_per_token_loss``   what the loss function's sum is divided by  what the wrapper multiplies ``.grad`` with
=============================  ==========================================  =======================================================
True                           nothing                                     1 / tokens of all ranks, in ``scale_gradients``
False                          the microbatch's tokens and the rank's      1 / ranks, in ``finish_grad_sync``
                               number of microbatches
=============================  ==========================================  =======================================================

Only the first is independent of which rank runs what. With the second, unequal counts would make a sample's weight depend on its rank, so
they are refused.

The two behaviours are mixins, because there is more than one wrapper to put them on: Megatron's, as here, and those of frameworks that
bring their own. All they ask of it is that ``module`` is the FSDP2 root and ``process_group`` spans all data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_odc.config import OdcConfig
from primus_odc.errors import ConfigError, ProtocolError
from primus_odc.fsdp.engine import Engine


class SummedGradients(_BaseDataParallel):
    """Mixin for an FSDP2 wrapper that keeps FSDP2's collectives: gradients are sums over ranks, normalised once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments are the wrapper's."""
        super().__init__(*args, **kwargs)
        self._sum_over_ranks()

    def _sum_over_ranks(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Called once after the last backward of a minibatch.

        Raises:
            ConfigError: ``force_all_reduce``; FSDP2 has no whole gradients to give.
        """
        if force_all_reduce:
            raise ConfigError(["Megatron asked for whole gradients on every rank (save_wgrads_interval); FSDP2 keeps shards: unset it"])
        if not self.config.calculate_per_token_loss:
            self.scale_gradients(1.0 / self.process_group.size())

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply every gradient; Megatron calls it with 1 / tokens of all ranks (a 0-dim tensor on the gradients' device)."""
        for parameter in self.module.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().mul_(scaling_factor)


class OnDemand(SummedGradients):
    """Mixin for an FSDP2 wrapper that drives the model on demand.

    The engine is attached by the first ``zero_grad_buffer()``, so after a checkpoint was loaded into the wrapped model; an evaluation
    before that uses FSDP2's collectives. Call :meth:`publish` after any later edit of the parameters.

    Attributes:
        engine: None until the first minibatch.
        num_microbatches: this rank's own number in the minibatches to come; a training loop that knows it sets it before
            ``zero_grad_buffer()``, so that gradients can leave during the last backward. None: they leave at the end.
    """

    def __init__(self, *args: Any, odc: OdcConfig | None = None, **kwargs: Any) -> None:
        """
        Args:
            odc: the ``odc:`` block.

        The others are the wrapper's.
        """
        super().__init__(*args, **kwargs)
        self.engine: Engine | None = None
        self.num_microbatches: int | None = None
        self._odc = odc or OdcConfig()
        self._unpublished = False

    def zero_grad_buffer(self) -> None:
        """Begin a minibatch; every rank calls it, also one that will run no microbatch. A rerun of a minibatch begins anew."""
        if self.engine is None:
            self.engine = self.make_engine(self._odc)
        self.module.zero_grad()
        self.engine.begin_minibatch(self.num_microbatches)
        self._unpublished = False

    def make_engine(self, odc: OdcConfig) -> Engine:
        """The engine to attach; overridden by loops that want another kind."""
        return Engine(self.module, odc)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped model's; an evaluation between two minibatches is the first that needs the new parameters, and publishes them."""
        if self._unpublished:
            self.publish()
        return super().forward(*inputs, **kwargs)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Settle; afterwards ``.grad`` is complete on every rank, also on one that ran nothing.

        Raises:
            ConfigError: without ``calculate_per_token_loss``, the ranks ran different numbers of microbatches. Raised on every rank.
            ProtocolError: no minibatch was begun.
        """
        if self.engine is None:
            raise ProtocolError("finish_grad_sync() without a minibatch: the training loop has to call zero_grad_buffer() first")
        if not self.config.calculate_per_token_loss:
            self._require_equal_counts(self.engine.stats()["microbatches"])
        self.engine.settle()
        self._unpublished = True
        super().finish_grad_sync(force_all_reduce)

    def publish(self) -> None:
        """Make edited parameters visible to the other ranks; every rank calls it."""
        if self.engine is not None:
            self.engine.publish()
        self._unpublished = False

    def detach(self) -> None:
        """Give FSDP2 its collectives back; gradients stay sums. Every rank calls it."""
        if self.engine is not None:
            self.engine.detach()
            self.engine = None
            self._sum_over_ranks()

    def _require_equal_counts(self, own: int) -> None:
        mine = torch.tensor([own], dtype=torch.int64, device=next(self.module.parameters()).device)
        parts = [torch.empty_like(mine) for _ in range(self.process_group.size())]
        dist.all_gather(parts, mine, group=self.process_group)
        counts = [int(part) for part in parts]
        if len(set(counts)) > 1:
            raise ConfigError(
                [
                    f"the ranks ran {counts} microbatches with calculate_per_token_loss: false, where the weight of a token depends on its "
                    "rank's count: the objective would change with the plan. Set calculate_per_token_loss: true"
                ]
            )


class SummedFSDP(SummedGradients, TorchFullyShardedDataParallel):
    """Megatron's FSDP2 wrapper with its own collectives and exact normalisation."""


class OnDemandFSDP(OnDemand, TorchFullyShardedDataParallel):
    """Megatron's FSDP2 wrapper on demand."""
