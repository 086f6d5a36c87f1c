"""The data plane over shared memory, both modes, against the plain-torch reference."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from primus_odc.errors import PeerError, ProtocolError
from primus_odc.primitives import reference, spec
from primus_odc.primitives.contribution import Contribution
from primus_odc.primitives.driver import run
from tests.primitives.groups import SHAPES, make_contribution, make_group
from tests.primitives.plane_ranks import PlaneRank, open_ranks, padded_rows, random_parameters, settle_and_publish, together

LAYOUT = (SHAPES, ((5, 2, False),), ((6, 6, True), (2, 1, True)))
"""A group with a frozen parameter, one that is frozen as a whole, and a plain one."""

PAIRS, STRIDED = ((0, 1), (2, 3)), ((0, 2), (1, 3))
CASES: dict[str, dict[str, Any]] = {
    "local-1": {"world_size": 1, "mode": "local"},
    "local-2-checksum": {"world_size": 2, "mode": "local", "verify": True},
    "local-3": {"world_size": 3, "mode": "local"},
    "local-hsdp": {"world_size": 4, "mode": "local", "replicas": 2},
    "owner-1": {"world_size": 1, "mode": "owner"},
    "owner-2-checksum": {"world_size": 2, "mode": "owner", "verify": True, "slots": 1},
    "owner-3": {"world_size": 3, "mode": "owner", "slots": 3},
    "owner-hsdp": {"world_size": 4, "mode": "owner", "replicas": 2, "slots": 2},
    "nodes-2x2": {"world_size": 4, "mode": "local", "members": PAIRS},
    "nodes-2+1-checksum": {"world_size": 3, "mode": "local", "members": ((0, 1), (2,)), "verify": True},
    "nodes-strided": {"world_size": 4, "mode": "local", "members": STRIDED},
    "nodes-hsdp": {"world_size": 4, "mode": "local", "members": PAIRS, "replicas": 2},
    "nodes-hsdp-strided-checksum": {"world_size": 4, "mode": "local", "members": STRIDED, "replicas": 2, "verify": True},
}
EPOCHS = 3


def make_plan(world_size: int, shards: int, seed: int, *, whole: bool) -> list[list[list[list[Contribution]]]]:
    """``[epoch][rank][group] -> contributions``: 0 to 3 microbatches a rank, each with some of the parameters of some of the groups."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups = [make_group(f"g{i}", shapes, shards, 0) for i, shapes in enumerate(LAYOUT)]
    plan: list[list[list[list[Contribution]]]] = []
    for _ in range(EPOCHS):
        plan.append([])
        for _ in range(world_size):
            mine: list[list[Contribution]] = [[] for _ in groups]
            for _ in range(rng.randint(0, 3)):
                for g, group in enumerate(groups):
                    everything = rng.random() < 0.5
                    params = [i for i, _ in group.trainable() if everything or rng.random() < 0.7]
                    if params and rng.random() < 0.8:
                        dtype = rng.choice((torch.float32, torch.bfloat16))
                        mine[g].append(make_contribution(group, params, generator, dtype, whole=whole))
            plan[-1].append(mine)
    return plan


@pytest.mark.parametrize("whole", [True, False], ids=["whole-numbers", "fractions"])
@pytest.mark.parametrize("name", CASES)
def test_epochs_against_the_reference(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_MAX_PIECE_BYTES_HOST", 256)  # most shards need more than one piece
    options: dict[str, Any] = dict(CASES[name])
    world_size = options.pop("world_size")
    shards = world_size // options.get("replicas", 1)
    generator = torch.Generator().manual_seed(7)
    parameters = [random_parameters(LAYOUT, generator) for _ in range(EPOCHS)]
    plan = make_plan(world_size, shards, seed=11, whole=whole)

    def main(rank: PlaneRank) -> list[list[torch.Tensor]]:
        settled = []
        rank.start_progress()
        for epoch in range(EPOCHS):
            rank.set_parameters(parameters[epoch])
            rank.publish()
            rank.protocol.begin()
            for g in [0, *range(len(LAYOUT))] if shards > 1 else []:
                rows = rank.gather(g)
                assert torch.equal(rows, padded_rows(parameters[epoch][g], rank.groups[g], rows)), (epoch, g)
            for g, contributions in enumerate(plan[epoch][rank.rank]):
                for contribution in contributions:
                    rank.reduce(g, contribution, "only" if len(contributions) == 1 else "first")
            rank.settle()
            for g, group in enumerate(rank.groups):
                expected = reference.settle(group, [source[g] for source in plan[epoch]], torch.float32)[rank.shard]
                # Across nodes the order of addition is another one than the reference's, and fixed all the same.
                if (options["mode"] == "local" and "members" not in options) or whole:
                    assert torch.equal(rank.grads[g], expected), (epoch, g)
                else:
                    torch.testing.assert_close(rank.grads[g], expected, rtol=1e-5, atol=1e-5)
            settled.append([rank.grads[g] for g in range(len(LAYOUT))])
        rank.close()
        return settled

    with open_ranks(world_size, LAYOUT, **options) as ranks:
        settled = together(ranks, main)
    for rank in range(shards, world_size):  # replicas hold the same bits, whatever arrived first
        for mine, theirs in zip(settled[rank], settled[rank % shards], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_published_shards_have_the_compute_dtype_and_do_not_follow_the_parameters() -> None:
    generator = torch.Generator().manual_seed(0)
    with open_ranks(2, LAYOUT, mode="local", gather_dtype=torch.bfloat16) as ranks:
        parameters = random_parameters(LAYOUT, generator)
        for rank in ranks:
            rank.set_parameters([[p.clone().requires_grad_() for p in group] for group in parameters])
        assert together(ranks, PlaneRank.publish) == [None, None]
        with torch.no_grad():
            for rank in ranks:
                for group in rank.parameters:
                    for p in group:
                        p.add_(1.0)
        for rank in ranks:
            rows = rank.gather(0)
            assert torch.equal(rows, padded_rows(parameters[0], rank.groups[0], rows))
        assert not ranks[0].plane.own_shard(0).requires_grad


def test_bytes_are_counted() -> None:
    with open_ranks(2, LAYOUT, mode="local") as ranks:
        for rank in ranks:
            rank.set_parameters(random_parameters(LAYOUT, torch.Generator().manual_seed(0)))
        together(ranks, PlaneRank.publish)
        ranks[0].gather(0)
        assert ranks[0].plane.bytes_gathered == 2 * ranks[0].groups[0].shard_nbytes
        for rank in ranks:
            rank.protocol.begin()
        ranks[1].reduce(2, make_contribution(ranks[1].groups[2], (0, 1), torch.Generator(), torch.float32, whole=True))
        assert together(ranks, PlaneRank.settle) == [None, None]
        assert [r.plane.bytes_reduced for r in ranks] == [ranks[0].groups[2].grad_nbytes, 0]


def test_a_source_without_credit_adds_up_by_itself_and_waits_for_nobody() -> None:
    """The owner gives no slot back at all until the source has reduced everything; only settle waits for it."""
    with open_ranks(2, (((64, 4, True), (16, 3, True)), ((8, 4, True),)), mode="owner", slots=2) as ranks:
        for rank in ranks:
            rank.set_parameters([[torch.zeros(64, 4), torch.zeros(16, 3)], [torch.zeros(8, 4)]])
        together(ranks, PlaneRank.publish)
        for rank in ranks:
            rank.protocol.begin()
        generator = torch.Generator()
        whole = make_contribution(ranks[0].groups[0], (0, 1), generator, torch.float32, whole=True)
        part = make_contribution(ranks[0].groups[0], (1,), generator, torch.float32, whole=True)
        other = make_contribution(ranks[0].groups[1], (0,), generator, torch.float32, whole=True)
        for contribution, group in ((whole, 0), (whole, 0), (part, 0), (other, 1), (whole, 0), (other, 1)):
            ranks[0].reduce(group, contribution)  # in this very thread: to wait would be to hang
        assert ranks[0].protocol.pushes.sums_kept == 2 and ranks[0].heap.words.read(0, "head", 1) == 2
        run(ranks[0].heap, ranks[0].protocol.declare(0))
        assert ranks[0].heap.words.read(0, "ready", 0) == 0  # what is kept is not there yet
        for rank in ranks:
            rank.start_progress()
        assert together(ranks, PlaneRank.settle) == [None, None]
        for shard, rank in enumerate(ranks):
            expected = 3 * whole.rows[shard]
            expected[-part.rows.shape[1] :] += part.rows[shard]
            torch.testing.assert_close(rank.grads[0], expected)
            torch.testing.assert_close(rank.grads[1], 2 * other.rows[shard])
        assert ranks[0].plane._kept == {} and not ranks[0].protocol.pushes.keeps()


def test_in_owner_mode_a_group_is_delivered_while_the_others_are_on_their_way() -> None:
    with open_ranks(2, (((8, 4, True),), ((8, 4, True),)), mode="owner", slots=2) as ranks:
        for rank in ranks:
            rank.set_parameters([[torch.zeros(8, 4)], [torch.zeros(8, 4)]])
            rank.start_progress()
        together(ranks, PlaneRank.publish)
        for rank in ranks:
            rank.protocol.begin()
        contribution = make_contribution(ranks[0].groups[0], (0,), torch.Generator(), torch.float32, whole=True)
        ranks[0].reduce(1, contribution)
        run(ranks[0].heap, ranks[0].protocol.declare(1))
        settling = threading.Thread(target=ranks[1].settle, daemon=True)
        settling.start()
        deadline = time.monotonic() + 20
        while 1 not in ranks[1].grads and time.monotonic() < deadline:
            time.sleep(0.001)
        assert torch.equal(ranks[1].grads[1], contribution.rows[1]) and 0 not in ranks[1].grads
        ranks[0].reduce(0, contribution)
        ranks[0].settle()
        settling.join(20)
        assert torch.equal(ranks[1].grads[0], contribution.rows[1])


@pytest.mark.parametrize(("mode", "replicas"), [("local", 1), ("owner", 1), ("owner", 2)])
def test_small_groups_are_summed_together_with_the_same_result(mode: str, replicas: int) -> None:
    """Five groups, of which the third is not summed in place: with any bound the sums are those of the groups one by one, and the last
    groups do not wait beyond settle."""
    layout = (((8, 3, True),), ((5, 2, True), (4, 4, True)), ((8, 4, True),), ((2, 1, False),), ((9, 3, True),), ((8, 8, True),))
    results, launches = [], []
    for merge_bytes in (0, 1, 130, 1 << 30):
        generator = torch.Generator().manual_seed(5)
        with open_ranks(4, layout, mode=mode, replicas=replicas, slots=2, merge_bytes=merge_bytes) as ranks:
            counts: list[int] = []
            original = ranks[0].plane._together

            class Counted:
                fits = original.fits

                def __call__(self, parts: Any, *, alone: bool, original: Any = original, counts: list[int] = counts) -> None:
                    counts.append(len(parts))
                    original(parts, alone=alone)

            ranks[0].plane._together = Counted()  # type: ignore[assignment]
            for rank in ranks:
                rank.set_parameters([[torch.zeros(rows, columns) for rows, columns, _ in shapes] for shapes in layout])
                rank.start_progress()
            for _ in range(2):
                assert together(ranks, PlaneRank.publish) == [None] * 4
                for rank in ranks:
                    rank.protocol.begin()
                    for group in (5, 4, 2, 1, 0):
                        if (rank.rank + group) % 3:
                            params = tuple(i for i, _ in rank.groups[group].trainable())
                            rank.reduce(group, make_contribution(rank.groups[group], params, generator, torch.float32, whole=True))
                assert together(ranks, PlaneRank.settle) == [None] * 4
            results.append([rank.grads for rank in ranks])
            launches.append(counts)
    assert launches[0] == [] and launches[3] == [5, 5] and launches[2] and max(launches[2]) < 5, launches
    for merged in results[1:]:
        for mine, expected in zip(merged, results[0], strict=True):
            assert mine.keys() == expected.keys()
            assert all(torch.equal(mine[g], expected[g]) for g in expected if mode == "local")
            assert all(torch.allclose(mine[g], expected[g], rtol=1e-5, atol=1e-6) for g in expected)


def test_a_piece_of_another_epoch_is_refused() -> None:
    with open_ranks(2, (((4, 1, True),),), mode="owner", slots=1) as ranks:
        gradients = torch.ones(2)
        ranks[0].plane.push(1, 0, 0, 5, (0, gradients))
        with pytest.raises(ProtocolError, match="rank 1: rank 0 pushed gradients of epoch 5 while epoch 4 is summed"):
            ranks[1].plane.add_arrival(0, 0, 4)


def test_an_error_in_the_progress_thread_ends_every_rank() -> None:
    with open_ranks(3, (((4, 1, True),),), mode="owner", slots=1) as ranks:
        for rank in ranks:
            rank.start_progress()
            rank.set_parameters([[torch.zeros(4, 1)]])
        together(ranks, PlaneRank.publish)
        ranks[0].plane.push(1, 0, 0, 9, (0, torch.ones(2)))
        ranks[0].heap.words.write("head", 1, 1)
        for rank in ranks:
            rank.protocol.begin()
        results = together(ranks, settle_and_publish)
        for result in results:
            assert isinstance(result, PeerError), results
            assert "rank 1: rank 0 pushed gradients of epoch 9 while epoch 1 is summed" in str(result)
        assert ranks[1].progress is not None
        with pytest.raises(ProtocolError, match="epoch 9"):
            ranks[1].progress.check()
        ranks[0].progress.check()  # type: ignore[union-attr]


def test_a_rank_that_fails_ends_the_waits_of_the_others() -> None:
    with open_ranks(3, LAYOUT, mode="local") as ranks:
        for rank in ranks:
            rank.set_parameters(random_parameters(LAYOUT, torch.Generator().manual_seed(0)))
        together(ranks, PlaneRank.publish)

        def main(rank: PlaneRank) -> None:
            rank.protocol.begin()
            if rank.rank == 2:
                rank.heap.abort("the loss is not finite")
            else:
                rank.settle()

        first, second, third = together(ranks, main)
        assert third is None
        for result in (first, second):
            assert isinstance(result, PeerError)
            assert "settle of group g2 (epoch 1)" in str(result)
            assert "rank 2 aborted: the loss is not finite" in str(result)


def test_evaluation_and_extra_publishes_with_any_counts() -> None:
    generator = torch.Generator().manual_seed(3)
    states = [random_parameters(LAYOUT, generator) for _ in range(4)]

    def main(rank: PlaneRank) -> None:
        for epoch, state in enumerate(states):
            rank.set_parameters(state)
            rank.publish()
            for _ in range((epoch + 2 * rank.rank) % 4):
                rows = rank.gather(2)
                assert torch.equal(rows, padded_rows(state[2], rank.groups[2], rows))
                time.sleep(0.002)
        run(rank.heap, rank.protocol.close())

    with open_ranks(3, LAYOUT, mode="local") as ranks:
        assert together(ranks, main) == [None] * 3
