from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.data.stream import MinibatchStream, epoch_order
from primus_odc.errors import DataError

# From the definition of PCG64 (XSL-RR 128/64, NumPy's SeedSequence) in plain integers, seed 1234, epochs 0 and 1.
GOLDEN = ([5, 6, 3, 7, 4, 1, 2, 0], [2, 0, 7, 6, 1, 4, 5, 3])


def take(stream: MinibatchStream, count: int) -> list[list[int]]:
    return [stream.next().tolist() for _ in range(count)]


def saved(stream: MinibatchStream) -> Any:
    return json.loads(json.dumps(stream.state_dict()))


def test_golden_order() -> None:
    """Sorting by the raw output of PCG64(SeedSequence((seed, epoch))), whose first values NumPy guarantees for ever."""
    assert epoch_order(8, 1234, 0).tolist() == GOLDEN[0] and epoch_order(8, 1234, 1).tolist() == GOLDEN[1]
    stream = MinibatchStream(8, 5, 1234)
    assert take(stream, 3) == [GOLDEN[0][:5], GOLDEN[0][5:] + GOLDEN[1][:2], GOLDEN[1][2:7]]
    assert stream.consumed_samples == 15


@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**40), st.integers(1, 12))
def test_every_sample_once_an_epoch(num_samples: int, batch: int, seed: int, steps: int) -> None:
    flat = np.concatenate(take(MinibatchStream(num_samples, batch, seed), steps))
    assert flat.size == steps * batch
    for start in range(0, flat.size, num_samples):
        epoch = flat[start : start + num_samples]
        assert max(Counter(epoch.tolist()).values()) == 1 and set(epoch) <= set(range(num_samples))
        assert epoch.size < num_samples or set(epoch) == set(range(num_samples))


def test_a_dataset_of_one_and_a_batch_over_several_epochs() -> None:
    assert take(MinibatchStream(1, 3, 0), 2) == [[0, 0, 0], [0, 0, 0]]
    (indices,) = take(MinibatchStream(2, 7, 5), 1)
    assert sorted(Counter(indices).values()) == [3, 4]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_first_place_is_uniform() -> None:
    counts = np.bincount([epoch_order(4, 7, epoch)[0] for epoch in range(4000)], minlength=4)
    # Binomial with p = 1/4: 1000 +- 27; five sigmas.
    assert np.all(np.abs(counts - 1000) < 137)


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 99), st.integers(0, 8), st.integers(0, 8))
def test_resumed_twice_equals_straight(num_samples: int, batch: int, seed: int, first: int, second: int) -> None:
    straight = take(MinibatchStream(num_samples, batch, seed), first + second + 3)
    one = MinibatchStream(num_samples, batch, seed)
    found = take(one, first)
    two = MinibatchStream(num_samples, batch, seed)
    two.load_state_dict(saved(one))
    found += take(two, second)
    three = MinibatchStream(num_samples, batch, seed)
    three.load_state_dict(saved(two))
    assert found + take(three, 3) == straight
    four = MinibatchStream(num_samples, batch, seed)
    four.fast_forward(first * batch)
    assert take(four, second + 3) == straight[first:]


def test_looking_ahead_does_not_move_the_stream() -> None:
    stream = MinibatchStream(10, 4, 1)
    ahead = [stream.minibatch_after(4 * step).tolist() for step in (2, 0, 1)]
    assert stream.consumed_samples == 0
    straight = take(stream, 3)
    assert ahead == [straight[2], straight[0], straight[1]]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (MinibatchStream(11, 4, 1, "f"), "num_samples was 11, is 10"),
        (MinibatchStream(10, 5, 1, "f"), "global_batch_size was 5, is 4"),
        (MinibatchStream(10, 4, 2, "f"), "seed was 2, is 1"),
        (MinibatchStream(10, 4, 1, "g"), "dataset_fingerprint was 'g', is 'f'"),
        (MinibatchStream(11, 5, 1, "f"), "num_samples was 11, is 10; global_batch_size was 5, is 4"),
    ],
)
def test_a_state_of_another_run_is_refused(other: MinibatchStream, reason: str) -> None:
    stream = MinibatchStream(10, 4, 1, "f")
    stream.next()
    other.next()
    other.next()
    with pytest.raises(DataError, match=f"another run: {reason}; resume with"):
        stream.load_state_dict(saved(other))
    assert stream.consumed_samples == 4


def test_incomplete_and_impossible_values_are_refused() -> None:
    with pytest.raises(DataError, match="damaged: seed, consumed_samples missing"):
        MinibatchStream(1, 1, 0).load_state_dict({"num_samples": 1, "global_batch_size": 1, "dataset_fingerprint": ""})
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(DataError, match="needs num_samples >= 1"):
            MinibatchStream(*arguments)
    with pytest.raises(DataError, match="cannot be negative"):
        MinibatchStream(1, 1, 0).fast_forward(-1)
