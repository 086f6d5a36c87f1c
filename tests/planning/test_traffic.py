"""Traffic across nodes against cases counted by hand; the engine's own counters are compared with it in tests/fsdp/test_nodes.py."""

from __future__ import annotations

import pytest

from primus_odc.errors import PlanError
from primus_odc.planning.traffic import GroupBytes, NodeTraffic, direct, ring, two_level

UNIT = [GroupBytes(shard=10, gradient=100)]
TWO_UNITS = [*UNIT, GroupBytes(shard=1, gradient=3)]


def test_two_nodes_of_two() -> None:
    # Ranks 0 and 1 land 10 bytes each in the other node, whose two shards get one partial of 100 each; twice two words of progress.
    expected = NodeTraffic(20, 200, 20, 200, messages=2 + 2 + 2 + 2, meetings=1)
    assert two_level([(0, 1), (2, 3)], 4, UNIT) == [expected, expected]
    both = two_level([(0, 1), (2, 3)], 4, TWO_UNITS)[0]
    assert (both.out, both.messages) == (20 + 2 + 200 + 6, 4 + 4 + 2 + 2)


def test_unequal_nodes() -> None:
    large, small = two_level([(0, 1), (2,)], 3, UNIT, norms=0)
    assert (large.out_parameters, large.out_gradients, large.messages) == (20, 100, 2 + 1 + 1)
    assert (small.out_parameters, small.out_gradients, small.messages) == (10, 200, 1 + 2 + 2)


def test_hsdp_with_groups_in_nodes_sends_no_parameter() -> None:
    for node in two_level([(0, 1), (2, 3)], 2, UNIT):
        assert (node.out_parameters, node.out_gradients, node.messages) == (0, 200, 2 + 2)


def test_hsdp_with_groups_across_nodes() -> None:
    # Node 0 holds shard 0 of both replicas and node 1 shard 1: one partial each way, and each owner lands once.
    for node in two_level([(0, 2), (1, 3)], 2, UNIT):
        assert (node.out_parameters, node.out_gradients) == (20, 100)


def test_ring() -> None:
    # Three shards of four pass the link; two gathers and one reduction a microbatch.
    assert ring(2, 2, UNIT, 3) == NodeTraffic(180, 900, 180, 900, messages=3 * 3 * 3, meetings=9)
    assert ring(2, 2, UNIT, 3, resident=True) == NodeTraffic(30, 300, 30, 300, messages=6, meetings=2)
    # Two replicas of one node: nothing but the all-reduce crosses, 2 * (2 - 1) / 2 of each of two shards.
    assert ring(2, 2, UNIT, 1, replicas=2) == NodeTraffic(0, 200, 0, 200, messages=4, meetings=4)
    with pytest.raises(PlanError, match="3 replicas do not divide 2 nodes"):
        ring(2, 2, UNIT, 1, replicas=3)


def test_the_published_port() -> None:
    # Each of two ranks reads all four shards, twice: 2 * 2 * 4 * 10, half of it from the other node.
    node = direct(2, 2, UNIT, 1)
    assert (node.network_parameters, node.out_parameters) == (160, 80)
    assert (node.network_gradients, node.out_gradients) == (800, 400)
    assert (node.messages, node.meetings) == (4 * (4 * 1 + 2 * (1 + 1)), 4)
    assert direct(2, 2, [GroupBytes(10, 65537)], 1).messages == 4 * (4 + 2 * 3)


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_only_ours_does_not_depend_on_microbatches(nodes: int) -> None:
    layout = [range(8 * n, 8 * n + 8) for n in range(nodes)]
    (ours,) = set(two_level(layout, 8 * nodes, UNIT))
    # What a node lacks is (1 - 1 / nodes) of the whole, once; a ring carries nearly the whole, for every gather.
    assert ours.out == 8 * (nodes - 1) * 110
    assert ours.out < ring(nodes, 8, UNIT, 1, resident=True).out
    assert direct(nodes, 8, UNIT, 4).out == 8 * 8 * (nodes - 1) * (2 * 4 * 10 + 100)
