"""A prediction of step times across nodes, from plans, FLOPs and the bytes of :mod:`primus_odc.planning.traffic`.

Nothing here was measured across nodes. What a microbatch computes follows from the model's FLOPs; a transfer takes its bytes over a rate;
what can run beside computing costs nothing unless it takes longer. Per arm, for the plan each runs:

* collectives with equal counts: all ranks meet in every microbatch, whose forward takes as long as the gather beside it if that is longer,
  its backward as long as gather and reduction; the first gather and the last reduction of a step, one unit each, are exposed;
* ours: the longest rank; every forward and backward beside a gather inside the node, the first forward beside the landing of all shards;
  the reduction beside the last backward, what is left of it exposed, one unit at least;
* the published port: the longest rank, with every gather exposed (it prefetches nothing) and the reduction behind the last backward.

The published dual-node table is that of the port, so its model has one free rate, that of its reads over a NIC, fitted to the table's four
points; how well it then fits says how far to trust the rest. The rates of the two other arms are :class:`Machine`'s, not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from primus_odc.planning.cost import CostModel
from primus_odc.planning.lengths import named_distribution
from primus_odc.planning.plan import MinibatchPlan
from primus_odc.planning.policies import plan_minibatch
from primus_odc.planning.traffic import GroupBytes, NodeTraffic, direct, ring, two_level

PUBLISHED_14B = {1: 0.796, 2: 0.892, 4: 1.120, 8: 1.154}
"""Speed-up of odc_nopad over collectives by samples a rank, as published for the port: DeepSeek-R1-Distill-Qwen-14B, LongAlign, two nodes
of eight GPUs, global batches 16, 32, 64 and 128."""


@dataclass(frozen=True)
class DenseShape:
    """A decoder of Qwen2's kind; every layer is a unit, embedding and head are one each."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    vocabulary: int

    def cost_model(self) -> CostModel:
        """In FLOPs, with full recomputation, as long sequences are trained."""
        return CostModel.from_model_shape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.key_value_heads,
            vocab_size=self.vocabulary,
            recompute=True,
        )

    def units(self) -> list[int]:
        """Parameters of each unit, biases and norms left out."""
        head = self.hidden // self.heads
        layer = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value_heads * head + 3 * self.hidden * self.ffn
        return [layer] * self.layers + [self.vocabulary * self.hidden] * 2

    def groups(self, shards: int, gradient_bytes: int) -> list[GroupBytes]:
        """Shards gathered in bf16, gradients that travel in ``gradient_bytes`` each."""
        return [GroupBytes(2 * -(-n // shards), gradient_bytes * -(-n // shards)) for n in self.units()]


SHAPES = {
    "1.5B": DenseShape(28, 1536, 8960, 12, 2, 151936),
    "7B": DenseShape(28, 3584, 18944, 28, 4, 152064),
    "14B": DenseShape(48, 5120, 13824, 40, 8, 152064),
    "32B": DenseShape(64, 5120, 27648, 40, 8, 152064),
}
"""DeepSeek-R1-Distill-Qwen of that size."""


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, assumed: what it computes, its NIC in one direction, and what it reads inside the node."""

    tflops: float = 400.0
    nic_gbytes: float = 40.0
    link_gbytes: float = 250.0


@dataclass(frozen=True)
class Step:
    """Seconds of one step: without any communication, and as predicted."""

    computing: float
    total: float


_FORWARD = 1 / 4
"""Of a microbatch whose backward computes every layer's forward again."""


class Layout:
    """Transfer times, in seconds, of one model on equal nodes."""

    def __init__(self, shape: DenseShape, nodes: int, ranks_per_node: int, machine: Machine) -> None:
        self.shape, self.nodes, self.per_node, self.machine = shape, nodes, ranks_per_node, machine
        self.world = nodes * ranks_per_node

    def _groups(self, gradient_bytes: int) -> list[GroupBytes]:
        return self.shape.groups(self.world, gradient_bytes)

    def ours(self) -> NodeTraffic:
        """Of one node: all of them are alike."""
        ranks = [range(n * self.per_node, (n + 1) * self.per_node) for n in range(self.nodes)]
        return two_level(ranks, self.world, self._groups(4))[0]

    def collectives(self, microbatches: int, *, resident: bool = False) -> NodeTraffic:
        return ring(self.nodes, self.per_node, self._groups(2), microbatches, resident=resident)

    def port(self, microbatches: int) -> NodeTraffic:
        return direct(self.nodes, self.per_node, self._groups(2), microbatches)

    def over_nics(self, nbytes: float) -> float:
        return nbytes / (self.per_node * self.machine.nic_gbytes * 1e9)

    def inside(self, nbytes: float) -> float:
        """Bytes that one rank reads."""
        return nbytes / (self.machine.link_gbytes * 1e9)

    def step_of_collectives(self, costs: Sequence[Sequence[float]]) -> Step:
        """``costs[rank][microbatch]`` in seconds, equal counts."""
        longest = np.array(costs, dtype=np.float64).max(axis=0)
        one, units = self.collectives(1), len(self.shape.units())
        gather, reduction = self.over_nics(one.out_parameters / 2), self.over_nics(one.out_gradients)
        beside = [max(_FORWARD * c, gather) + max((1 - _FORWARD) * c, gather + reduction) for c in longest]
        return Step(float(longest.sum()), math.fsum(beside) + (gather + reduction) / units)

    def step_of_ours(self, costs: Sequence[Sequence[float]]) -> Step:
        traffic, units = self.ours(), len(self.shape.units())
        landing, across = self.over_nics(traffic.out_parameters), self.over_nics(traffic.out_gradients)
        gather = self.inside(sum(g.shard for g in self._groups(4)) * (self.world - 1))
        in_node = self.inside(sum(g.gradient for g in self._groups(4)) * self.nodes * (self.per_node - 1))
        ends: list[float] = []
        hidden = 0.0
        for mine in costs:
            end = 0.0
            for i, c in enumerate(mine):
                end += max(_FORWARD * c, gather, landing if i == 0 else 0.0) + max((1 - _FORWARD) * c, gather)
            if not ends or end > max(ends):
                hidden = (1 - _FORWARD) * mine[-1] if mine else 0.0
            ends.append(end)
        settle = in_node + across
        exposed = landing / units + max(settle - hidden * (units - 1) / units, settle / units)
        return Step(max(math.fsum(mine) for mine in costs), max(ends) + exposed)

    def step_of_port(self, costs: Sequence[Sequence[float]], nic_gbytes: float) -> Step:
        rate = self.per_node * nic_gbytes * 1e9
        one = self.port(1)
        gathers, reduction = one.network_parameters / rate, one.network_gradients / rate
        return Step(max(math.fsum(mine) for mine in costs), max(math.fsum(mine) + gathers * len(mine) for mine in costs) + reduction)


@dataclass(frozen=True)
class Prediction:
    """One point: speed-ups over collectives; ``possible`` is what the plans alone would give."""

    samples_per_rank: int
    published: float
    port: float
    ours: float
    possible: float


@dataclass(frozen=True)
class DualNode:
    """``points`` beside the published table, with the port's fitted rate (GB/s a NIC) and its root mean square error."""

    points: list[Prediction]
    port_gbytes: float
    error: float


def predict_dual_node(machine: Machine, *, lengths: str = "longalign-like", cap: int = 65536, minibatches: int = 32) -> DualNode:
    """The published table of two nodes of eight, and what ours would have there."""
    layout = Layout(SHAPES["14B"], 2, 8, machine)
    steps = {samples: _minibatches(layout, lengths, samples, cap, minibatches) for samples in PUBLISHED_14B}
    collectives = {n: [layout.step_of_collectives(pad) for pad, _ in drawn] for n, drawn in steps.items()}
    baseline = {n: math.fsum(step.total for step in found) for n, found in collectives.items()}

    def port(rate: float) -> dict[int, float]:
        return {n: baseline[n] / math.fsum(layout.step_of_port(nopad, rate).total for _, nopad in steps[n]) for n in steps}

    def error(rate: float) -> float:
        return math.sqrt(sum((value - PUBLISHED_14B[n]) ** 2 for n, value in port(rate).items()) / len(PUBLISHED_14B))

    rate = min(np.geomspace(1.0, 100.0, 201), key=error)
    fitted = port(float(rate))
    points = []
    for n, drawn in steps.items():
        ours = [layout.step_of_ours(nopad) for _, nopad in drawn]
        computing = math.fsum(s.computing for s in collectives[n]) / math.fsum(s.computing for s in ours)
        points.append(Prediction(n, PUBLISHED_14B[n], fitted[n], baseline[n] / math.fsum(s.total for s in ours), computing))
    return DualNode(points, float(rate), error(float(rate)))


def _minibatches(
    layout: Layout, lengths: str, samples_per_rank: int, cap: int, count: int
) -> list[tuple[list[list[float]], list[list[float]]]]:
    """Of ``count`` minibatches the seconds ``[rank][microbatch]`` of both plans: equal counts, and each rank its own."""
    distribution, cost_model = named_distribution(lengths), layout.shape.cost_model()
    assert distribution is not None
    size = layout.world * samples_per_rank
    tokens = np.minimum(distribution.sample(size * count, 0), cap)
    seconds = replace(
        cost_model,
        per_token=cost_model.per_token / (layout.machine.tflops * 1e12),
        per_token_squared=cost_model.per_token_squared / (layout.machine.tflops * 1e12),
    )

    def costs(plan: MinibatchPlan) -> list[list[float]]:
        return [[float(c) for c in rank] for rank in plan.microbatch_costs(seconds)]

    found = []
    for first in range(0, size * count, size):
        drawn = tokens[first : first + size].tolist()
        pad, nopad = (plan_minibatch(policy, drawn, layout.world, cap, seconds) for policy in ("lb_micro", "lb_mini"))
        found.append((costs(pad), costs(nopad)))
    return found
