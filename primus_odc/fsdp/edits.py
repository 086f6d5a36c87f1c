"""Finds parameters that were edited after they were published: their peers would compute with other values than their owner.

The first gather of a unit in an evaluation or a minibatch compares what FSDP2 would use of this rank with what it published; units that a
minibatch did not gather are compared when it settles. In host memory the answer is there at once. On a device asking for it would make the
host wait for its own device at every unit: the answers are collected there, fetched when the minibatch settles, and told when the next
epoch is published, before anything is computed with it. Where no minibatch is between two publications, only evaluations, they are fetched
by the second. Where FSDP2 takes its slice from what was published anyway
(:mod:`primus_odc.fsdp.own`), one launch compares all such units, beside the forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from primus_odc.errors import ProtocolError
from primus_odc.primitives.plane import ArenaPlane

if TYPE_CHECKING:
    from primus_odc.primitives.differences import Differences


class EditCheck:
    """One rank's check. ``me`` is how it is called in messages, ``names`` its groups' names."""

    def __init__(self, me: str, names: Sequence[str], plane: ArenaPlane) -> None:
        self._me = me
        self._names = names
        self._plane = plane
        self._lanes = plane.lanes
        self._checked = [0] * len(names)
        self._epoch = 0
        self._compared: tuple[int, ...] = ()
        self._differences: Differences | None = None
        self._on_device = plane.heap.device.type != "cpu"
        if self._on_device:
            self._flags = torch.zeros(len(names), dtype=torch.bool, device=plane.heap.device)
            self._fetched = torch.zeros(len(names), dtype=torch.bool, pin_memory=True)
            self._arrived = self._lanes.event()
            self._open = False  # whether something was compared since the last fetch

    def renew(self) -> None:
        """A minibatch begins: what was found before says nothing about edits since."""
        self._checked = [0] * len(self._names)

    def unchecked(self, epoch: int) -> list[int]:
        """Groups that were not compared since then."""
        return [group for group, checked in enumerate(self._checked) if checked != epoch]

    def compare(self, group: int, own: torch.Tensor, epoch: int) -> None:
        """Compare the bytes that are used now, or would be, with the published ones, once per group until :meth:`renew`.

        Raises:
            ProtocolError: they differ (host memory).
        """
        if self._checked[group] == epoch:
            return
        self._checked[group] = epoch
        published = self._plane.own_shard(group)
        if not self._on_device:
            if not torch.equal(own, published):
                self._refuse([group], epoch)
            return
        if own.numel() % 8 == 0 and own.data_ptr() % 8 == 0:
            own, published = own.view(torch.int64), published.view(torch.int64)
        self._flags[group : group + 1].logical_or_((own != published).any())
        self._epoch, self._open = epoch, True

    def compare_parameters(self, group: int, others: Collection[int], epoch: int) -> None:
        """The same of a group whose parameters FSDP2 does not look at; on a device of all ``others`` too, among which it is.

        Raises:
            ProtocolError: as :meth:`compare`.
        """
        if self._checked[group] == epoch:
            return
        if not self._on_device:
            self.compare(group, self._plane.current_shard(group), epoch)
            return
        for other in others:
            self._checked[other] = epoch
        publisher = self._plane.publisher
        pairs = [(g, *both) for g in others for both in zip(publisher.shards[g], publisher.places[g], strict=True)]
        places = tuple(shard.data_ptr() for _, shard, _ in pairs)
        if self._differences is None or places != self._compared:
            from primus_odc.primitives.differences import Differences

            self._differences, self._compared = Differences(pairs), places
        with self._lanes.on(self._lanes.settle, after_current=False):  # where nothing else is until the end of backward
            self._differences(self._flags.view(torch.uint8))
        self._epoch, self._open = epoch, True

    def fetch(self) -> None:
        """Copy the answers to the host, in the order of the current stream, which comes after the gathers."""
        if self._on_device:
            self._fetched.copy_(self._flags, non_blocking=True)
            self._lanes.record(self._arrived)
            self._open = False

    def require_none(self) -> None:
        """Tell what was found up to now.

        Raises:
            ProtocolError: naming the groups and the epoch in which they were used.
        """
        if self._on_device:
            if self._open:
                self.fetch()
            self._arrived.synchronize()
            if edited := [g for g, found in enumerate(self._fetched.tolist()) if found]:
                self._refuse(edited, self._epoch)

    def _refuse(self, groups: Sequence[int], epoch: int) -> None:
        names = ", ".join(self._names[g] for g in groups)
        raise ProtocolError(
            f"{self._me}: parameters of group {names} changed after they were published in epoch {epoch}; call "
            "engine.publish() on every rank after any edit outside settle() ... optimizer.step()"
        )
