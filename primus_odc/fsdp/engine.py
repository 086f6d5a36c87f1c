"""The engine: an FSDP2 model whose ranks meet once per minibatch.

::

    engine = primus_odc.attach(model)
    engine.begin_minibatch(num_microbatches=n)   # this rank's own count
    ...loss.backward() n times...                # divide each loss sum by the minibatch's global target-token count
    engine.settle()                              # .grad is complete on every rank
    optimizer.step(); optimizer.zero_grad()

``begin_minibatch`` publishes the new parameters if nobody did. The protocol and its states stand in
:mod:`primus_odc.primitives.protocol`; this file binds it to FSDP2 through public setters and hooks only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from primus_odc.config import OdcConfig, parse_options
from primus_odc.errors import ProtocolError
from primus_odc.fsdp.assembly import assemble
from primus_odc.fsdp.binding import give_back, restore_collectives, take_over
from primus_odc.fsdp.choices import describe
from primus_odc.fsdp.edits import EditCheck
from primus_odc.fsdp.forwards import ForwardHooks
from primus_odc.fsdp.gather import Into, OnDemandAllGather
from primus_odc.fsdp.gradients import GradientStore
from primus_odc.fsdp.microbatches import MicrobatchTracker
from primus_odc.fsdp.norm import NormCheck, clip, global_norm
from primus_odc.fsdp.own import OwnSlices
from primus_odc.fsdp.preparation import prepare
from primus_odc.fsdp.probe import reshard
from primus_odc.fsdp.reduce import ScatterAccumulate, Zeros
from primus_odc.fsdp.verify import ReferenceCheck
from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.driver import ProgressThread, deliver_complete, push, push_kept, run
from primus_odc.primitives.plane import Fill
from primus_odc.primitives.protocol import State

logger = logging.getLogger("primus_odc")

_ATTACHED: weakref.WeakSet[FSDPModule] = weakref.WeakSet()


def attach(model: nn.Module, **options: Any) -> Engine:
    """Give an FSDP2 model on-demand communication; call after ``fully_shard`` and after its weights are loaded, on every rank.

    Args:
        model: the root FSDP2 module (1-D mesh, or 2-D for HSDP).
        **options: the keys of the ``odc:`` block (:class:`primus_odc.config.OdcConfig`): ``transport``, ``accumulate``, ``parameters``,
            ``memory_budget_gib``, ``deterministic``, ``verify``, ``timeout_s``, ...

    Raises:
        ConfigError: a wrong option.
        UnsupportedModelError: the model or its sharding cannot be served; the message lists why.
        VersionError: torch outside the tested range.
    """
    return Engine(model, parse_options(options))


class Engine:
    """On-demand communication of one model on one rank; made by :func:`attach`.

    Attributes:
        choices: the resolved transport, accumulate and parameters modes.
        memory: bytes the engine adds to this rank, by purpose (:func:`primus_odc.primitives.spec.memory_bytes`).
    """

    def __init__(self, model: nn.Module, config: OdcConfig) -> None:
        self._modules, self._mesh, self._device, self._units, self.choices = prepare(model, config, _ATTACHED)
        self._progress: ProgressThread | None = None
        self._handles: list[Any] = []
        self._reducers: list[ScatterAccumulate] = []
        self._how = {"hsdp": self._mesh.replicate_group is not None, "resident": self.choices.parameters == "resident"}
        with contextlib.ExitStack() as undo:  # on an error, the last one first
            undo.callback(restore_collectives, self._modules)
            parts = assemble(
                config,
                self.choices,
                self._mesh,
                [u.spec for u in self._units],
                self._device,
                read_shard_of=lambda g, i: self._units[g].slots[i].sharded().to_local(),
                reshard=self._reshard_for_optimizer,
                deliver=self._deliver,
                direct=lambda g: self._gradients.direct(g) if self._reference is None else None,
            )
            self._heap, self._plane, self._protocol, self.memory = parts.heap, parts.plane, parts.protocol, parts.memory
            undo.callback(self._heap.close, goodbye=False)
            undo.callback(self._let_go)
            with self._guard("attach"):
                self._build(model, config)
            take_over(self._modules, self._units, lambda g: self._gathers[g], lambda g: self._reducers[g], **self._how)
            undo.callback(give_back, self._modules, **self._how)
            self.publish()
            undo.pop_all()
        _ATTACHED.update(self._modules)
        if self._mesh.rank == 0:
            logger.info(describe(self.choices, self._mesh, self._units, self.memory))

    def _build(self, model: nn.Module, config: OdcConfig) -> None:
        """What this rank alone needs, on what it shares."""
        specs = [u.spec for u in self._units]
        zeros = Zeros(specs, self._device, partial=self._mesh.replicate_group is not None)
        self._gradients = GradientStore(self._units, zeros.hold)
        self._handles += self._gradients.handles
        self._reference = ReferenceCheck(self._mesh, specs, self._device) if config.verify == "reference" else None
        self._progress = ProgressThread(self._heap, self._protocol, self._plane.lanes) if self.choices.accumulate == "owner" else None
        self._edits = EditCheck(self._mesh.names[self._mesh.rank], [s.name for s in specs], self._plane.lanes, self._device)
        self._slices = OwnSlices(self._units, self._plane.own_shard)
        # What verifies looks at sums on the host, or in collectives: not in the middle of backward.
        self._delivers_early = self._progress is not None and config.verify == "off"
        self._reducers = [ScatterAccumulate(self, g, unit, zeros) for g, unit in enumerate(self._units)]
        self._gathers = [OnDemandAllGather(self, g, spec) for g, spec in enumerate(specs)]
        self._norms = 0
        self._norm_check = NormCheck(self._mesh, self._plane.lanes, self._device)
        self._tracker = MicrobatchTracker(model, self._units, self._declare, self._guard)
        hooks = ForwardHooks(model, lambda: self._protocol.state is State.ACTIVE, self._reshard, self._edits.renew)
        saved = model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: self._slices.forget())  # in a minibatch too
        self._handles += [*self._tracker.handles, *hooks.handles, saved]
        self._stats: dict[str, Any] = self.totals()

    def _let_go(self) -> None:
        """Take all hooks off the model and end the progress thread."""
        for handle in [*self._handles, *(h for r in self._reducers for h in r.handles)]:
            handle.remove()
        if self._progress is not None:
            self._progress.stop()

    # What a training loop calls ------------------------------------------------------------------------------------------------------

    def begin_minibatch(self, num_microbatches: int | None = None) -> None:
        """Enter a minibatch; publishes the parameters first if that has not happened since the last settle.

        Args:
            num_microbatches: this rank's own number of forward-backward passes, zero included. None: say :meth:`last_microbatch`
                before the last one, or let settle complete everything.
        """
        if num_microbatches is not None and num_microbatches < 0:
            raise ProtocolError(f"begin_minibatch(num_microbatches={num_microbatches}): a count cannot be negative")
        if self._protocol.state is State.SETTLED:
            self.publish()
        with self._guard("begin_minibatch of all groups"):
            self._protocol.begin()
            self._heap.store("begun", self._protocol.epoch)
            self._reshard()  # an evaluation may have left modules unsharded, and with them out of reach what the user did to .grad
            self._gradients.adopt()
            self._early = self._delivers_early and self._gradients.untouched()
            self._edits.renew()
            for reducer in self._reducers:
                reducer.reset()
            self._tracker.begin(num_microbatches)
            self._plane.lanes.compute_here()
            self._stats = self.totals()
            if num_microbatches == 0:
                for g in range(len(self._units)):
                    self._declare(g)

    def last_microbatch(self) -> None:
        """The next forward-backward is the last of this minibatch on this rank: its gradients may leave while it runs."""
        with self._guard("last_microbatch of all groups"):
            self._require_active("last_microbatch")
            self._tracker.close()

    def settle(self) -> None:
        """End the minibatch: afterwards ``.grad`` of every trainable parameter is the sum over all ranks, also where this rank ran nothing.

        Parameters without any gradient in the whole minibatch get zeros.
        """
        with self._guard("settle of all groups"):
            self._require_active("settle")
            self._tracker.end()
            self._slices.forget()
            for reducer in self._reducers:
                reducer.require_reduced()
            self._gradients.require_unassigned(*range(len(self._units)))
            for g in self._edits.unchecked(self._protocol.epoch):
                if self._units[g].spec.shards > 1:
                    self._edits.compare(g, self._plane.current_shard(g), self._plane.own_shard(g), self._protocol.epoch)
            for g in range(len(self._units)):
                self._declare(g)
            lanes = self._plane.lanes
            self._caller: Any = lanes.current()
            push_kept(self._heap, self._protocol, self._plane)
            # Not behind the caller's stream, which is still busy with backward: only behind begin_minibatch, i.e. the optimizer.
            eager = self._progress.eager() if self._progress is not None else contextlib.nullcontext()
            with eager, lanes.on(lanes.settle, after_current=False):
                run(self._heap, self._protocol.settle(self._heap.read))
                self._edits.fetch()
            self._gradients.hand_over()
            lanes.join(lanes.settle)
            self._plane.deliveries = None

    def publish(self) -> None:
        """Make this rank's parameters visible to the others, as the next epoch; called on every rank.

        Needed by hand only after an edit outside the optimizer step (a load, an EMA swap) or to evaluate before the next minibatch.
        """
        with self._guard("publish of all groups"):
            self._caller = self._plane.lanes.current()
            if self._protocol.state is not State.ACTIVE:
                self._reshard()
                self._plane.publisher.look_up()
            before = self._moved()
            run(self._heap, self._protocol.publish())
            with self._plane.lanes.on(self._plane.lanes.settle):  # beside the forward pass that comes
                run(self._heap, self._protocol.land())
            self._published = {key: value - before[key] for key, value in self._moved().items()}
            self._edits.require_none()
            self._norm_check.require_same()
            if self._reference is not None:
                self._reference.publication(self._read_all, self._plane.own_shard, self._protocol.epoch)

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The global norm before clipping: fp32, 0-dim, equal on all ranks. ``max_norm=inf`` only measures. On a device NaN where ranks
            asked for different norms, which a later call tells.
        """
        norm = self._norm(norm_type, max_norm)
        clip(self._gradients, norm, max_norm)
        return norm.to(torch.float32)

    def grad_norm(self, norm_type: float | str = 2.0) -> float:
        """Global gradient norm over all shards, in fp64; called on every rank after settle."""
        norm = float(self._norm(norm_type, math.inf))
        with self._guard("grad_norm of all groups"):
            self._norm_check.require_same()
        return norm

    def _norm(self, norm_type: float | str, max_norm: float) -> torch.Tensor:
        norm_type = float(norm_type)  # torch takes "inf" too
        if not norm_type > 0.0:
            raise ValueError(f"norm_type is {norm_type:g}; a positive number or inf is needed")
        with self._guard("grad_norm of all groups"):
            epoch = self._protocol.epoch
            if self._protocol.state is State.ACTIVE:
                raise ProtocolError(
                    f"{self._mesh.names[self._mesh.rank]}: the gradients of epoch {epoch} are not there yet: call settle() "
                    "first; norms and clipping belong between settle() and zero_grad()"
                )
            operation = f"grad_norm of all groups (epoch {epoch})"
            self._norms += 1
            wanted = (norm_type, float(max_norm), self._norm_check, operation)
            return global_norm(self._gradients, self._mesh, self._heap, self._protocol, *wanted)

    @property
    def rank(self) -> int:
        """This rank's place in the mesh: replica * shards + shard index."""
        return self._mesh.rank

    def totals(self) -> dict[str, Any]:
        """Since attach: ``waited_s`` (seconds by operation); bytes this rank moved, ``bytes_gathered`` of parameters and ``bytes_reduced``
        of gradients; how many of both it put into other nodes, ``bytes_across_nodes``, and with how many signals, ``signals_across_nodes``;
        ``sums_kept``: how often (``owner``) an owner had no free slot, so that gradients for it were added up here first; ``collectives``:
        the engine's own, of gradient norms on devices (``verify: reference`` has more).
        """
        counted = {"sums_kept": self._protocol.pushes.sums_kept, "collectives": self._norms if self._device.type != "cpu" else 0}
        return {"waited_s": dict(self._heap.waited_s), **self._moved(), **counted}

    def _moved(self) -> dict[str, int]:
        plane = self._plane
        moved = {"bytes_gathered": plane.bytes_gathered, "bytes_reduced": plane.bytes_reduced}
        return moved | {"bytes_across_nodes": plane.bytes_across, "signals_across_nodes": self._heap.signals}

    def stats(self) -> dict[str, Any]:
        """Since the last ``begin_minibatch``, and what the publish before it moved: the same as :meth:`totals`, with ``epoch`` and this
        rank's ``microbatches``."""
        now, before = self.totals(), self._stats
        waited = {k: v - before["waited_s"].get(k, 0.0) for k, v in now["waited_s"].items()}
        counted = {k: now[k] - before[k] + self._published.get(k, 0) for k in now if k != "waited_s"}
        return {"epoch": self._protocol.epoch, "microbatches": self._tracker.microbatches, "waited_s": waited, **counted}

    def time_settle(self) -> list[tuple[Any, int]]:
        """A list that this minibatch fills (call it before backward): an event at each group's delivery, and the bytes of others in it."""
        self._plane.deliveries = []
        return self._plane.deliveries

    def wait_for(self, done: Callable[[], bool], operation: str) -> None:
        """Wait until ``done()``, for what all ranks do together outside the engine (a collective of the training script).

        Raises:
            PeerError: a rank died or aborted meanwhile.
            PeerTimeoutError: a rank showed no sign of life for ``odc.timeout_s``, or it took three times as long in all.
        """
        with self._guard(operation):
            self._heap.wait_for(done, f"{operation} (epoch {self._protocol.epoch})")

    def detach(self) -> None:
        """Give the model FSDP2's own communication back and leave; called on every rank. A minibatch in progress is settled first.

        Gradients, parameters and their sharding stay; ``reshard_after_forward`` is True afterwards if parameters were resident.
        """
        if self._protocol.state is State.ACTIVE:
            self.settle()
        with self._guard("detach of all groups"):
            run(self._heap, self._protocol.close())
            self._let_go()
            self._reshard()
            give_back(self._modules, **self._how)
        try:
            self._heap.close()
        finally:
            _ATTACHED.difference_update(self._modules)

    # What the hooks call -------------------------------------------------------------------------------------------------------------

    def gather(self, group: int, into: Into, own: torch.Tensor | None) -> None:
        """Called by FSDP2 through :class:`OnDemandAllGather`: read the shards of ``group`` where ``into`` says.

        ``own`` is FSDP2's copy of this rank's shard (bytes); None when every owner's shard, this rank's included, has to be read.
        """
        name = self._units[group].spec.name
        with self._guard(f"gather of group {name}"), self._plane.lanes.gathering():
            run(self._heap, self._protocol.gather(group, into, own=own is None))
            if own is not None:  # beside the copies
                self._edits.compare(group, own, self._plane.own_shard(group), self._protocol.epoch)
            if self._protocol.state is State.ACTIVE and self.choices.parameters == "reshard":
                self._slices.gathered(group, whole=own is not None)

    def reduce(self, group: int, contribution: Contribution) -> None:
        """Called by FSDP2 through :class:`ScatterAccumulate`: take the gradients of one backward of ``group``."""
        spec = self._units[group].spec
        with self._guard(f"reduction of group {spec.name}"):
            self._gradients.require_unassigned(group)  # FSDP2 is about to add to what is there
            if self._reference is not None:
                self._reference.add(group, contribution)
            self._slices.reduced(group)
            if self.choices.accumulate == "local":
                run(self._heap, self._protocol.reduce_local(group, contribution))
            else:
                push(self._heap, self._protocol, self._plane, group, contribution)
            if spec.shards > 1:  # in a shard group of one, gradients come parameter by parameter: complete at settle
                self._tracker.reduced(group)
            if self._early:
                deliver_complete(self._heap, self._protocol, self._plane)

    def place(self, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where FSDP2 may write the gradients of all parameters of ``group`` for the next :meth:`reduce`; None: where it likes."""
        if self.choices.accumulate != "local" or self._protocol.state is not State.ACTIVE or self._protocol.declared[group]:
            return None
        return self._plane.place(group, dtype, only=self._tracker.announced == 1)

    def _declare(self, group: int) -> None:
        run(self._heap, self._protocol.declare(group))

    def _deliver(self, group: int, fill: Fill) -> None:
        if self._reference is not None:
            spec = self._units[group].spec
            total = torch.empty(spec.grad_numel, dtype=spec.sum_dtype, device=self._device)
            fill(total)
            self._reference.gradients(group, total, self._protocol.epoch)
        self._gradients.deliver(group, fill)

    def _reshard(self) -> None:
        for unit, gathered in zip(self._units, self._gathers, strict=True):
            gathered.drop(unit)
        reshard(self._modules, self._units)

    def _reshard_for_optimizer(self) -> None:
        # What FSDP2 frees and records belongs into the stream in which the model computes.
        with self._plane.lanes.on(self._caller, after_current=False):
            self._reshard()

    def _read_all(self, group: int, into: Into) -> None:
        # The copies are there for the current stream when the lane ends.
        with self._plane.lanes.gathering():
            run(self._heap, self._protocol.gather(group, into, own=True))

    def _require_active(self, operation: str) -> None:
        if self._protocol.state is not State.ACTIVE:
            raise ProtocolError(f"{self._mesh.names[self._mesh.rank]}: {operation}() outside a minibatch: call begin_minibatch() first")

    @contextlib.contextmanager
    def _guard(self, operation: str) -> Iterator[None]:
        """An error here would leave the others waiting: tell them, so that all ranks end with the same cause."""
        try:
            if self._progress is not None:
                self._progress.check()
            self._heap.check(f"{operation} (epoch {self._protocol.epoch})")
            yield
        except BaseException as error:
            self._heap.abort(f"{operation}: {error}")
            raise
