from __future__ import annotations

import numpy as np
import pytest

from primus_odc.errors import ProtocolError
from primus_odc.symmetric.words import WordLayout, Words


def two_ranks() -> tuple[Words, Words]:
    layout = WordLayout.of({"a": 1, "none": 0, "b": 3})
    blocks = {r: np.zeros(layout.total, np.int64) for r in range(2)}
    return Words(layout, blocks, 0), Words(layout, blocks, 1)


def test_layout_is_dense_and_checks_bounds() -> None:
    layout = WordLayout.of({"a": 1, "none": 0, "b": 3})
    assert (layout.total, layout.nbytes) == (4, 32)
    assert [layout.position("a", 0)] + [layout.position("b", i) for i in range(3)] == [0, 1, 2, 3]
    for name, index in (("a", 1), ("none", 0), ("b", 3), ("b", -1)):
        with pytest.raises(IndexError, match=name):
            layout.position(name, index)
    with pytest.raises(ValueError, match="negative"):
        WordLayout.of({"a": -1})


def test_each_rank_writes_its_own_block_and_reads_all() -> None:
    first, second = two_ranks()
    first.write("b", 5, 2)
    second.write("b", 7, 2)
    assert [first.read(r, "b", 2) for r in (0, 1)] == [second.read(r, "b", 2) for r in (0, 1)] == [5, 7]
    assert first.read(0, "b", 1) == 0


def test_words_never_fall_but_payload_may() -> None:
    words, _ = two_ranks()
    words.write("a", 5)
    words.write("a", 5)
    with pytest.raises(ProtocolError, match=r"a\[0\] would fall from 5 to 4"):
        words.write("a", 4)
    words.put("a", 1)
    assert words.read(0, "a") == 1


def test_words_hold_the_whole_range_of_64_bits() -> None:
    words, other = two_ranks()
    words.put("b", -(1 << 63), 0)
    words.put("b", (1 << 63) - 1, 1)
    assert [other.read(0, "b", i) for i in range(2)] == [-(1 << 63), (1 << 63) - 1]


@pytest.mark.parametrize(
    "block",
    [np.zeros(4, np.int32), np.zeros(5, np.int64), np.frombuffer(bytearray(40), np.uint8)[1:33].view(np.int64)],
    ids=["dtype", "length", "misaligned"],
)
def test_blocks_that_cannot_hold_the_words_are_refused(block: np.ndarray) -> None:
    layout = WordLayout.of({"a": 4})
    with pytest.raises(ValueError, match="block of rank 1"):
        Words(layout, {0: np.zeros(4, np.int64), 1: block}, 0)
