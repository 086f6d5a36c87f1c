"""What crosses between nodes in one optimizer step: bytes, messages and meetings, counted from the layout alone.

Three ways to move the same parameters and gradients:

* ``two_level``: ours (:mod:`primus_odc.primitives.two_level`). A shard enters every other node once a step, a node's partial gradient of a
  shard leaves it once a step for every node that owns the shard, whatever the number of microbatches.
* ``ring``: all-gather and reduce-scatter rings in which the ranks of a node are neighbours, so one link leads out of each node. FSDP2
  gathers a group before its forward and before its backward and reduces after it, in every microbatch; with ``resident`` (``nccl_zero2``)
  once a step.
* ``direct``: the published port across nodes. Every rank reads every shard over its NIC, those of its own node and its own included, for
  every gather; gradients add up locally and every owner reads its part from every rank, group by group between two barriers, after one
  element of every 64 KiB was read and thrown away.

A model of transfers, not of time; :mod:`primus_odc.planning.across` makes a prediction of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primus_odc.errors import PlanError

SETTLE_STRIDE = 65536
"""Bytes of the port's staging memory for which it reads one element beforehand."""


@dataclass(frozen=True)
class GroupBytes:
    """One FSDP2 unit: bytes of a shard as it is gathered, and of a shard's gradients as they travel."""

    shard: int
    gradient: int


@dataclass(frozen=True)
class NodeTraffic:
    """One node in one step. ``network_*`` passed its NICs, those bytes that stayed in the node included; ``out_*`` left it."""

    out_parameters: int = 0
    out_gradients: int = 0
    network_parameters: int = 0
    network_gradients: int = 0
    messages: int = 0
    """Transfers its ranks start; with ``two_level`` the words that go alone too."""
    meetings: int = 0
    """Points at which every rank of the job waits for every other one: collectives, barriers, or the one publish."""

    @property
    def out(self) -> int:
        return self.out_parameters + self.out_gradients

    @property
    def network(self) -> int:
        return self.network_parameters + self.network_gradients


def two_level(nodes: Sequence[Sequence[int]], shards: int, groups: Sequence[GroupBytes], *, norms: int = 1) -> list[NodeTraffic]:
    """Every node's traffic with all ranks having data for all groups.

    Args:
        nodes: the ranks of each; rank r owns shard ``r % shards`` in replica ``r // shards``.
        shards: ranks of a shard group.
        groups: the units.
        norms: gradient norms taken in the step (each sends one number per owner and node).
    """
    shard, gradient = sum(g.shard for g in groups), sum(g.gradient for g in groups)
    found = []
    for here, ranks in enumerate(nodes):
        landings = partials = 0
        for there, others in enumerate(nodes):
            if there == here:
                continue
            # An owner lands its shard there if a rank of its own shard group computes there.
            landings += sum(any(other // shards == rank // shards for other in others) for rank in ranks)
            partials += len({other % shards for other in others})
        words = sum(len(others) for there, others in enumerate(nodes) if there != here)  # each is told how far this node is
        out = (landings * shard, partials * gradient)
        messages = (landings + partials) * len(groups) + words + norms * landings
        found.append(NodeTraffic(*out, *out, messages=messages, meetings=1))
    return found


def ring(
    nodes: int, ranks_per_node: int, groups: Sequence[GroupBytes], microbatches: int, *, resident: bool = False, replicas: int = 1
) -> NodeTraffic:
    """One node's traffic with collectives, every rank running ``microbatches``.

    Args:
        resident: parameters stay unsharded within the step and gradients are reduced once.
        replicas: HSDP with shard groups of whole nodes: FSDP2 all-reduces every shard over them in each microbatch.
    """
    if nodes % replicas:
        raise PlanError(f"{replicas} replicas do not divide {nodes} nodes")
    world = nodes * ranks_per_node
    shards, times = world // replicas, 1 if resident else microbatches
    gathers = 1 if resident else 2 * microbatches
    across = shards - 1 if nodes > replicas else 0  # shards pass the one link out of a node, all but its neighbour's own
    parameters = gathers * across * sum(g.shard for g in groups)
    gradients = times * across * sum(g.gradient for g in groups)
    # A ring of `replicas` for each of the node's shards: twice (replicas - 1) / replicas of it leave every member.
    gradients += times * ranks_per_node * 2 * (replicas - 1) * sum(g.gradient for g in groups) // replicas
    kinds = len(groups) * ((gathers + times) * (shards > 1) + times * (replicas > 1))
    messages = len(groups) * ((gathers + times) * across + times * ranks_per_node * 2 * (replicas - 1))
    return NodeTraffic(parameters, gradients, parameters, gradients, messages, kinds)


def direct(nodes: int, ranks_per_node: int, groups: Sequence[GroupBytes], microbatches: int) -> NodeTraffic:
    """One node's traffic with the published port, every rank running ``microbatches``."""
    world, far = nodes * ranks_per_node, (nodes - 1) * ranks_per_node
    reads = 2 * microbatches * ranks_per_node
    shard, gradient = sum(g.shard for g in groups), sum(g.gradient for g in groups)
    thrown_away = sum(-(-g.gradient // SETTLE_STRIDE) for g in groups)
    return NodeTraffic(
        out_parameters=reads * far * shard,
        out_gradients=ranks_per_node * far * gradient,
        network_parameters=reads * world * shard,
        network_gradients=ranks_per_node * world * gradient,
        messages=world * (reads * len(groups) + ranks_per_node * (len(groups) + thrown_away)),
        meetings=2 * len(groups) + 2,
    )
