"""A number and its tag in one word."""

from __future__ import annotations

import itertools
import math
import struct

from hypothesis import given
from hypothesis import strategies as st

from primus_odc.fsdp.norm import norm_tag
from primus_odc.primitives.scalar import TAGS, join, part


@given(st.floats(allow_nan=False), st.integers(0, TAGS - 1))
def test_a_number_keeps_forty_bits_of_its_fraction(value: float, tag: int) -> None:
    word = join(value, tag)
    assert struct.unpack("=q", struct.pack("=q", word))[0] == word
    back, told = part(word)
    assert told == tag and math.copysign(1.0, back) == math.copysign(1.0, value)
    assert back == value or abs(value - back) <= max(abs(value) * 2.0**-40, TAGS * 5e-324)


def test_what_is_not_finite_stays_so() -> None:
    for tag in (0, 1, TAGS - 1):
        assert part(join(math.inf, tag)) == (math.inf, tag) and part(join(-math.inf, tag))[0] == -math.inf
        assert math.isnan(part(join(math.nan, tag))[0]) and math.isnan(part(join(-math.nan, tag))[0])
        assert part(join(0.0, tag)) == (0.0, tag)


def test_a_number_of_single_precision_is_kept_exactly() -> None:
    value = struct.unpack("=f", struct.pack("=f", 0.1))[0]
    assert part(join(value, 77)) == (value, 77)


def test_usual_norms_have_tags_of_their_own() -> None:
    kinds = list(itertools.product((0.5, 1.0, 2.0, 3.0, 4.0, math.inf), (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf)))
    assert len({norm_tag(*kind) for kind in kinds}) == len(kinds)
    assert norm_tag(2.0, 0.0) == norm_tag(2.0, -0.0) and norm_tag(2.0, math.nan) == norm_tag(2.0, -math.nan)
