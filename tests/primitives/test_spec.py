from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.primitives import spec
from primus_odc.primitives.nodes import Across
from primus_odc.primitives.spec import far_word_counts, layout_digest, memory_bytes, piece_bytes, plan_arena, word_counts
from tests.primitives.groups import SHAPES, groups, make_group

CPU = torch.device("cpu")


ACROSS = st.builds(Across, st.integers(0, 3), st.integers(0, 2))


@given(st.lists(groups(shards=3), max_size=4), st.sampled_from(["local", "owner"]), st.integers(1, 3), ACROSS)
@settings(max_examples=50)
def test_the_arena_is_what_memory_bytes_announces(parts: list[spec.GroupSpec], mode: str, slots: int, across: Across) -> None:
    plan, memory = plan_arena(parts, mode, slots, CPU, across), memory_bytes(parts, mode, slots, CPU, across)
    rings = 3 if parts else 1
    shared = sum(memory[purpose] for purpose in ("shards", "gradients", "ring", "fan_out", "staging"))
    assert shared <= plan.nbytes <= shared + 3 * 256  # each ring may be padded to the arena's alignment
    for i, g in enumerate(parts):
        assert plan.regions[f"shard.{i}"].nbytes == g.shard_nbytes
        assert plan.regions[f"grads.{i}"].nbytes == g.grad_numel * 4 * (3 if mode == "local" else 1)
    if mode == "owner":
        assert {plan.regions[f"ring.{j}"].nbytes for j in range(rings)} == {slots * piece_bytes(parts, CPU)}


def test_a_slot_holds_the_largest_gradient_shard_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [make_group("a", SHAPES, 2, 0), make_group("b", ((100, 30, True),), 2, 0)]
    assert piece_bytes(parts, CPU) >= 50 * 30 * 4
    monkeypatch.setattr(spec, "_MAX_PIECE_BYTES_HOST", 512)
    assert piece_bytes(parts, CPU) == 512
    assert piece_bytes([], CPU) == 0


def test_the_digest_covers_what_must_be_equal_and_nothing_else() -> None:
    group = make_group("a", SHAPES, 3, 0)
    same_elsewhere = make_group("a", SHAPES, 3, 2)
    assert group != same_elsewhere, "the last rank has shorter shards"
    digest = layout_digest([group], ["local", 4])
    assert layout_digest([same_elsewhere], ["local", 4]) == digest
    others = [
        make_group("b", SHAPES, 3, 0),
        make_group("a", SHAPES[:-1], 3, 0),
        make_group("a", SHAPES, 2, 0),
        make_group("a", SHAPES, 3, 0, gather_dtype=torch.bfloat16),
        dataclasses.replace(group, params=tuple(dataclasses.replace(p, trainable=True) for p in group.params)),
    ]
    digests = [layout_digest([other], ["local", 4]) for other in others]
    digests += [layout_digest([group, group], ["local", 4]), layout_digest([group], ["owner", 4]), digest]
    assert len(set(digests)) == len(digests)


def test_what_lies_in_the_arena_for_other_nodes() -> None:
    parts = [make_group("a", ((6, 2, True),), 3, 0), make_group("b", ((3, 5, True),), 3, 0)]  # shards of 4 and 5 elements
    plan, memory = plan_arena(parts, "local", 0, CPU, Across(2, 1)), memory_bytes(parts, "local", 0, CPU, Across(2, 1))
    assert (memory["fan_out"], memory["staging"]) == (2 * 2 * 256, 2 * 256 + 256)
    sizes = {name: region.nbytes for name, region in plan.regions.items() if name[:2] in ("la", "st")}
    # 16 and 20 bytes, to a multiple of 8, and a checksum
    assert sizes == {"land.0.0": 24, "land.1.0": 24, "stage.0.0": 24, "land.0.1": 32, "land.1.1": 32, "stage.0.1": 32}
    assert plan.regions["announced"].nbytes == 2 * (1 + 3) * 8  # of each group: a checksum of the own shard, and of a partial of every one
    near, far = word_counts(2, "local", 5, 3, 0, Across(2, 1)), far_word_counts(2, Across(2, 1))
    assert near["partial"] == 6
    assert (far["landed"], far["arrived"], far["node_done"], far["far_scalar"]) == (4, 4, 2, 4)
    assert not set(near) & set(far) and not far_word_counts(2, Across())


def test_words_of_both_modes() -> None:
    local, owner = word_counts(3, "local", 4, 2, 5), word_counts(3, "owner", 4, 2, 5)
    assert local["ready"] == 3
    assert local["grad_sum"] == 6
    assert "head" not in local
    assert owner["piece"] == 2 * 5 * 6
    assert (owner["head"], owner["tail"], owner["summed"]) == (4, 4, 3)
