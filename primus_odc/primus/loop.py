"""One arm inside Megatron's own training loop.

Megatron's ``train()`` stays as it is. It looks up ``train_step`` and ``dummy_train_step`` in its module at every step, and the FSDP2
wrapper when it builds the model; :meth:`ArmLoop.installed` puts something of ours in those places for as long as a run lasts:

* the wrapper, as a subclass of whatever stands there, with the mixin of the arm (:mod:`primus_odc.megatron.wrapper`);
* around ``train_step``: the step's plan is made, once, before Megatron runs the step's passes any number of times (a rerun replays the same
  microbatches), and each rank runs its own number of them. A rank without any runs no forward and finalizes the gradients itself, on the
  same groups. A minibatch without a target is skipped for real. Afterwards the step is reported;
* for ``dummy_train_step``, by which Megatron drops the data of ``iterations_to_skip``: the step's plan is made and left.

Which minibatch a step has follows from the samples consumed alone, so resumed and skipped steps get the right one.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config

from primus_odc.config import OdcConfig, ParsedComm
from primus_odc.errors import OdcError, PlanError, VersionError
from primus_odc.fsdp.engine import Engine
from primus_odc.megatron.meter import Meter
from primus_odc.megatron.on_demand import MeteredEngine
from primus_odc.megatron.wrapper import OnDemand, SummedGradients
from primus_odc.primus.plan import MinibatchSource, StepPlan
from primus_odc.primus.report import SAME_DATA, StepReporter
from primus_odc.versions import MEGATRON

logger = logging.getLogger("primus_odc")

_REPLACED = ("torch_FSDP", "train_step", "dummy_train_step")
LOSS = "lm loss"
"""The name under which Megatron's forward steps report a loss: [its sum, the number of targets]."""


def wrapper_class(base: Any, comm: ParsedComm, meter: Meter) -> type:
    """``base``, an FSDP2 wrapper of Megatron's interface, with the mixin of the arm."""

    class Summed(SummedGradients, base):
        """The wrapper on collectives, with sums of gradients."""

    class Demand(OnDemand, base):
        """The wrapper on demand."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, odc=comm.odc, **kwargs)

        def make_engine(self, odc: OdcConfig) -> Engine:
            return MeteredEngine(self.module, odc, meter)

    return Summed if comm.comm_backend == "nccl_pad" else Demand


class ArmLoop:
    """One run of one arm on this rank."""

    def __init__(self, comm: ParsedComm, reporter: StepReporter, meter: Meter) -> None:
        self._comm = comm
        self._reporter = reporter
        self._meter = meter
        self._source: MinibatchSource | None = None
        self._models: list[Any] = []
        self._agreed = False

    def use(self, source: MinibatchSource) -> MinibatchSource:
        """Set the data of the run; Megatron takes it as its (external) data loader."""
        self._source = source
        return source

    @contextmanager
    def installed(self, training: ModuleType) -> Iterator[None]:
        """As long as the ``with`` block runs, ``training`` (``megatron.training.training``) trains this arm.

        Raises:
            VersionError: it has not what is to be replaced.
        """
        if missing := [name for name in _REPLACED if not hasattr(training, name)]:
            raise VersionError(f"{training.__name__} has no {', '.join(missing)}, which this release replaces: use {MEGATRON}")
        native = {name: getattr(training, name) for name in _REPLACED}
        training.torch_FSDP = wrapper_class(native["torch_FSDP"], self._comm, self._meter)  # type: ignore[attr-defined]
        training.train_step = functools.partial(self._train_step, native["train_step"], training.get_args)  # type: ignore[attr-defined]
        training.dummy_train_step = functools.partial(self._skip_step, training.get_args)  # type: ignore[attr-defined]
        try:
            yield
            for model in self._models:
                if isinstance(model, OnDemand):
                    model.detach()
        finally:
            vars(training).update(native)
            if self._source is not None:
                self._source.close()
            self._reporter.close()

    def _train_step(
        self,
        original: Callable[..., Any],
        get_args: Callable[[], Any],
        forward_step_func: Any,
        data_iterator: Any,
        model: list[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        *others: Any,
        **named: Any,
    ) -> Any:
        """In place of Megatron's: the same arguments, the same result."""
        args = get_args()
        start = time.perf_counter()
        plan = self._begin(args)
        if not self._agreed:
            self._agree(model, plan)
        if plan.target_tokens == 0:
            if dist.get_rank() == 0:
                logger.warning("step %d skipped: none of its %d samples has a target token", plan.step + 1, plan.samples)
            self._reporter.skipped(plan)
            return {}, 1, False, False, 0, None, None, 0
        own = plan.counts[dist.get_rank()]
        for chunk in model:
            if isinstance(chunk, OnDemand):
                chunk.num_microbatches = own
        passes = functools.partial(_run_passes, forward_backward_func, own)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        with self._meter.collectives() if self._comm.comm_backend == "nccl_pad" else nullcontext():
            result = original(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, passes, *others, **named)
        losses, skipped, _, leaving, _, grad_norm, *_ = result
        if leaving:  # the rerun state machine ends the job without an optimizer step
            return result
        loss = float(losses[LOSS])
        self._require_finite(args, plan, loss, grad_norm)
        self._reporter.trained(
            plan,
            loss=loss,
            grad_norm=float(grad_norm),
            learning_rate=learning_rate,
            seconds=time.perf_counter() - start,
            engine=self._engine(),
            skipped=bool(skipped),
        )
        return result

    def _skip_step(self, get_args: Callable[[], Any], data_iterator: Any) -> None:
        """In place of Megatron's ``dummy_train_step``."""
        plan = self._begin(get_args())
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            pass
        self._reporter.skipped(plan)

    def _begin(self, args: Any) -> StepPlan:
        assert self._source is not None
        return self._source.begin(self._reporter.next_step(args.iteration), args.consumed_train_samples)

    def _agree(self, model: list[Any], plan: StepPlan) -> None:
        """Before the first pass: with another arm or plan on some rank, collectives would hang instead of failing.

        Raises:
            PlanError: on every rank, if the ranks do not do the same.
            OdcError: on every rank, if the model of some rank was not wrapped for the arm.
        """
        self._models = model
        wanted = SummedGradients if self._comm.comm_backend == "nccl_pad" else OnDemand
        wrapped = all(isinstance(chunk, wanted) for chunk in model)
        found: list[tuple[str, bool, str]] = [("", False, "")] * dist.get_world_size()
        dist.all_gather_object(found, (self._comm.arm, wrapped, plan.digest))
        if stray := [rank for rank, (_, good, _) in enumerate(found) if not good]:
            raise OdcError(
                f"the model of ranks {stray} is not wrapped for {self._comm.arm}: something replaced torch_FSDP of Megatron's training"
            )
        if other := [rank for rank, (arm, _, _) in enumerate(found) if arm != found[0][0]]:
            raise OdcError(
                f"ranks {other} train in arm {sorted({found[r][0] for r in other})}, rank 0 in {found[0][0]}: use one YAML on all"
            )
        if other := [rank for rank, (_, _, digest) in enumerate(found) if digest != found[0][2]]:
            raise PlanError(f"step {plan.step + 1}: ranks {other} hold another minibatch than rank 0; {SAME_DATA}")
        self._agreed = True
        if dist.get_rank() == 0:
            logger.info("all %d ranks train in arm %s on the same first minibatch", dist.get_world_size(), self._comm.arm)

    def _engine(self) -> Engine | None:
        return next((chunk.engine for chunk in self._models if isinstance(chunk, OnDemand)), None)

    @staticmethod
    def _require_finite(args: Any, plan: StepPlan, loss: float, grad_norm: Any) -> None:
        if args.check_for_nan_in_loss_and_grad and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise OdcError(
                f"step {plan.step + 1}: the loss is {loss} at a gradient norm of {grad_norm} (check_for_nan_in_loss_and_grad: true); "
                "the weights of this step are not to be used"
            )


def _run_passes(original: Callable[..., Any], own: int, *positional: Any, **named: Any) -> Any:
    """Megatron's forward-backward function with this rank's number of microbatches."""
    if own:
        return original(*positional, **{**named, "num_microbatches": own})
    chunks = named["model"] if isinstance(named["model"], list) else [named["model"]]
    config = get_model_config(chunks[0])
    device = next(chunks[0].parameters()).device
    targets = torch.zeros([], dtype=torch.int, device=device) if config.calculate_per_token_loss else None
    config.finalize_model_grads_func(chunks, targets, force_all_reduce=named.get("force_all_reduce", False))
    return [{LOSS: torch.zeros(2, device=device)}]
