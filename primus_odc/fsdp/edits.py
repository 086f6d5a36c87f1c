"""Finds parameters that were edited after they were published: their peers would compute with other values than their owner.

The first gather of a unit in an evaluation or a minibatch compares FSDP2's own slice with what this rank published; units that a minibatch
did not gather are compared when it settles. In host memory the answer is there at once. On a device asking for it would make the host wait
for its own device at every unit: the answers are collected there, fetched when the minibatch settles, and told when the next epoch is
published, before anything is computed with it. Where no minibatch is between two publications, only evaluations, the second fetches them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primus_odc.errors import ProtocolError
from primus_odc.primitives.lanes import Lanes


class EditCheck:
    """One rank's check. ``me`` is how it is called in messages, ``names`` its groups' names."""

    def __init__(self, me: str, names: Sequence[str], lanes: Lanes, device: torch.device) -> None:
        self._me = me
        self._names = names
        self._lanes = lanes
        self._checked = [0] * len(names)
        self._epoch = 0
        self._on_device = device.type != "cpu"
        if self._on_device:
            self._flags = torch.zeros(len(names), dtype=torch.bool, device=device)
            self._fetched = torch.zeros(len(names), dtype=torch.bool, device="cpu", pin_memory=True)
            self._arrived = lanes.event()
            self._open = False  # whether something was compared since the last fetch

    def renew(self) -> None:
        """A minibatch begins or an evaluation ended: what was found before says nothing about edits since."""
        self._checked = [0] * len(self._names)

    def unchecked(self, epoch: int) -> list[int]:
        """Groups that were not compared since then."""
        return [group for group, checked in enumerate(self._checked) if checked != epoch]

    def compare(self, group: int, own: torch.Tensor, published: torch.Tensor, epoch: int) -> None:
        """Compare the bytes that are used now with the published ones, once per group until :meth:`renew`.

        Raises:
            ProtocolError: they differ (host memory).
        """
        if self._checked[group] == epoch:
            return
        self._checked[group] = epoch
        if not self._on_device:
            if not torch.equal(own, published):
                self._refuse([self._names[group]], epoch)
            return
        if own.numel() % 8 == 0 and own.data_ptr() % 8 == 0:
            own, published = own.view(torch.int64), published.view(torch.int64)
        self._flags[group : group + 1].logical_or_((own != published).any())
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
            if bool(self._fetched.any()):
                self._refuse([name for name, edited in zip(self._names, self._fetched.tolist(), strict=True) if edited], self._epoch)

    def _refuse(self, groups: Sequence[str], epoch: int) -> None:
        raise ProtocolError(
            f"{self._me}: parameters of group {', '.join(groups)} changed after they were published in epoch {epoch}; call "
            "engine.publish() on every rank after any edit outside settle() ... optimizer.step()"
        )
