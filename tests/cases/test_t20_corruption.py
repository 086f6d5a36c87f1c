"""T20: one byte flipped, or stale data, in what a rank reads: checksum mode finds it and names group, ranks and epoch; the start-up
pattern test finds a wrong mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from primus_odc.errors import OdcError, PeerError, VerificationError
from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.driver import run
from primus_odc.symmetric import presence
from primus_odc.symmetric.host import HostMesh
from tests.primitives.groups import make_contribution
from tests.primitives.plane_ranks import PlaneRank, open_ranks, random_parameters, settle_and_publish, together
from tests.symmetric.harness import in_threads, make_heap

LAYOUT = (((7, 3, True), (2, 2, False)), ((4, 4, True),))


@pytest.fixture
def local_ranks() -> Iterator[list[PlaneRank]]:
    with open_ranks(3, LAYOUT, mode="local", verify=True) as ranks:
        publish(ranks, 1)
        yield ranks


def publish(ranks: list[PlaneRank], seed: int) -> None:
    for rank in ranks:
        rank.set_parameters(random_parameters(LAYOUT, torch.Generator().manual_seed(seed)))
    assert together(ranks, PlaneRank.publish) == [None] * len(ranks)


def flip(data: torch.Tensor, byte: int) -> None:
    data[byte] ^= 1 << (byte % 8)


def test_any_flipped_byte_of_a_shard_is_found(local_ranks: list[PlaneRank]) -> None:
    shard = local_ranks[2].plane.own_shard(0)
    assert local_ranks[0].gather(0).shape[0] == 3
    for byte in range(shard.numel()):
        flip(shard, byte)
        with pytest.raises(VerificationError, match=r"rank 0: shard of group g0 read from rank 2 \(epoch 1\): checksum"):
            local_ranks[0].gather(0)
        flip(shard, byte)
    local_ranks[0].gather(0)


def test_a_stale_shard_is_found(local_ranks: list[PlaneRank]) -> None:
    shard = local_ranks[1].plane.own_shard(1)
    old = shard.clone()
    publish(local_ranks, 2)
    shard.copy_(old)
    with pytest.raises(VerificationError, match=r"rank 2: shard of group g1 read from rank 1 \(epoch 2\).*corrupted or stale"):
        local_ranks[2].gather(1)


def contributions(rank: PlaneRank, group: int, seed: int = 0) -> Contribution:
    spec = rank.groups[group]
    generator = torch.Generator().manual_seed(seed)
    return make_contribution(spec, [i for i, _ in spec.trainable()], generator, torch.float32, whole=False)


@pytest.mark.parametrize("fault", ["flipped", "stale"])
def test_wrong_gradients_are_found_by_their_owner(local_ranks: list[PlaneRank], fault: str) -> None:
    ranks, group, owner = local_ranks, 0, 1
    for rank in ranks:
        rank.protocol.begin()
        rank.reduce(group, contributions(rank, group, seed=1))
    old = ranks[2].plane.unsharded(group).clone()
    assert together(ranks, PlaneRank.settle) == [None] * 3
    publish(ranks, 2)
    for rank in ranks:
        rank.protocol.begin()
        rank.reduce(group, contributions(rank, group, seed=2))
        run(rank.heap, rank.protocol.declare(group))
    row = ranks[2].plane.unsharded(group)[owner]
    if fault == "flipped":
        flip(row.view(torch.uint8), 5)
    else:
        row.copy_(old[owner])
    results = together(ranks, PlaneRank.settle)
    assert isinstance(results[owner], VerificationError), results
    assert "rank 1: gradients of group g0 pulled from rank 2 (epoch 2): checksum" in str(results[owner])
    assert [results[0], results[2]] == [None, None], "the other owners' rows are whole"


def test_a_corrupted_push_ends_every_rank_with_the_reason() -> None:
    with open_ranks(2, LAYOUT, mode="owner", slots=8, verify=True) as ranks:
        publish(ranks, 1)
        for rank in ranks:
            rank.protocol.begin()
        ranks[0].reduce(0, contributions(ranks[0], 0))
        flip(ranks[1].plane._slot(1, 0, 0), 9)
        for rank in ranks:
            rank.start_progress()
        for result in together(ranks, settle_and_publish):
            assert isinstance(result, PeerError), result
            assert "rank 1: gradients of group g0 pushed by rank 0 (epoch 1): checksum" in str(result)


def test_what_is_corrupted_on_its_way_to_another_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ranks(3, LAYOUT, mode="local", members=((0, 1), (2,)), verify=True) as ranks:
        publish(ranks, 1)
        nodes = ranks[0].topology.nodes
        assert nodes is not None
        home, slot = nodes.landings(0)[2]
        copy = ranks[home].heap.view(home, ranks[home].heap.plan.regions[f"land.{slot}.0"])
        flip(copy, 3)
        for reader in (0, 1):
            with pytest.raises(VerificationError, match=rf"rank {reader}: shard of group g0 read from rank 2 \(epoch 1\): checksum"):
                ranks[reader].gather(0)
        flip(copy, 3)
        ranks[1].gather(0)
        for rank in ranks:
            rank.protocol.begin()
            rank.reduce(0, contributions(rank, 0))
        send = ranks[2].plane.send_partial  # type: ignore[attr-defined]

        def corrupt(reducer: int, shard: int, group: int, epoch: int) -> None:
            send(reducer, shard, group, epoch)
            if reducer == 1:
                flip(ranks[1].plane._staged(2, group), 5)  # type: ignore[attr-defined]

        monkeypatch.setattr(ranks[2].plane, "send_partial", corrupt)
        results = together(ranks, PlaneRank.settle)
        assert "rank 1: gradients of group g0 pulled from rank 2 (epoch 1): checksum" in str(results[1])
        assert [results[0], results[2]] == [None, None], "the other owners' partials are whole"


def test_start_up_finds_two_swapped_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = presence.connect_host_mesh

    def swapped(rank: int, *args: object) -> HostMesh:
        mesh = connect(rank, *args)  # type: ignore[arg-type]
        if rank == 0:
            mesh.segments[1], mesh.segments[2] = mesh.segments[2], mesh.segments[1]
        return mesh

    monkeypatch.setattr(presence, "connect_host_mesh", swapped)
    results = in_threads(3, lambda rank, exchange: make_heap(rank, 3, exchange))
    for result in results:
        assert isinstance(result, OdcError), results
    assert re.search(r"start-up pattern test with rank \d failed: .* its memory is mapped wrongly", str(results))
