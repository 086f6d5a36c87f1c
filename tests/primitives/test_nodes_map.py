"""Who deals with whom across nodes: everybody is served once, work is even, and ranks of equal places meet."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from primus_odc.primitives.nodes import Nodes, group_into_nodes


@st.composite
def layouts(draw: st.DrawFn) -> Nodes:
    """Any ranks in two or more nodes of any sizes."""
    ranks = draw(st.integers(2, 12))
    node_of = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(lambda nodes: len(set(nodes)) > 1))
    shards = draw(st.sampled_from([s for s in range(1, ranks + 1) if ranks % s == 0]))
    return Nodes(tuple(tuple(r for r in range(ranks) if node_of[r] == node) for node in sorted(set(node_of))), shards)


@given(layouts())
def test_every_shard_lands_where_it_is_needed_and_nowhere_else(nodes: Nodes) -> None:
    for node, ranks in enumerate(nodes.members):
        needed = {r for r in nodes.node_of if nodes.node_of[r] != node and any(r // nodes.shards == m // nodes.shards for m in ranks)}
        landings = nodes.landings(node)
        assert set(landings) == needed == {r for r in nodes.node_of if nodes.landing(r, node)}
        assert len(set(landings.values())) == len(landings), "one slot each"
        loads = Counter(home for home, _ in landings.values())
        assert set(loads) <= set(ranks) and max(loads.values(), default=0) - min(loads[r] for r in ranks) <= 1
        assert all(slot < nodes.landing_slots for _, slot in landings.values())


@given(layouts())
def test_every_shard_has_one_reducer_in_every_node_an_owner_if_there_is_one(nodes: Nodes) -> None:
    for node, ranks in enumerate(nodes.members):
        reducers = [nodes.reducer(node, shard) for shard in range(nodes.shards)]
        assert sorted(s for r in ranks for s in nodes.reduced_by(r)) == list(range(nodes.shards))
        for shard, reducer in enumerate(reducers):
            owners = nodes.owners_in(node, shard)
            assert reducer in ranks and (not owners or reducer == owners[0])
            assert (node in nodes.owning_nodes(shard)) == bool(owners)
        others = Counter(reducer for shard, reducer in enumerate(reducers) if not nodes.owners_in(node, shard))
        assert max(others.values(), default=0) - min(others[r] for r in ranks) <= 1


@given(layouts())
def test_every_rank_is_told_by_one_contact_of_every_other_node(nodes: Nodes) -> None:
    for node, ranks in enumerate(nodes.members):
        told = [r for contact in ranks for r in nodes.told_by(contact)]
        assert sorted(told) == sorted(r for r in nodes.node_of if nodes.node_of[r] != node)
        assert all(nodes.contact(node, r) in ranks for r in told)


def test_equal_nodes_meet_rail_by_rail() -> None:
    nodes = group_into_nodes(range(24), 8, 24)
    assert nodes is not None and nodes.landing_slots == 2 and (nodes.across.landings, nodes.across.stagings) == (2, 2)
    for node in range(3):
        for rank in (r for r in range(24) if r // 8 != node):
            landing = nodes.landing(rank, node)
            assert landing is not None and landing[0] % 8 == rank % 8
            assert nodes.reducer(node, rank) % 8 == rank % 8
    assert [nodes.node_of[r] for r in nodes.from_next_node(1, [0, 9, 17, 23])] == [2, 2, 0, 1]


def test_nodes_follow_from_global_ranks() -> None:
    assert group_into_nodes([0, 1, 2], None, 3) is None
    assert group_into_nodes([0, 1, 2], 4, 3) is None
    assert group_into_nodes([4, 5], 2, 2) is None, "another model's ranks are not of this mesh"
    assert group_into_nodes([0, 1, 2], 2, 3) == Nodes(((0, 1), (2,)), 3)
    # A permuted mesh: heap ranks 0 and 2 are the global ranks 2 and 3 of the second node.
    assert group_into_nodes([2, 0, 3, 1], 2, 4) == Nodes(((1, 3), (0, 2)), 4)
