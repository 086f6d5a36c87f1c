from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from primus_odc.data import MinibatchStream, TokenDataset, build_dataset
from primus_odc.data.samples import Sample
from primus_odc.errors import PlanError, ProtocolError
from primus_odc.megatron.minibatch import Maker, Minibatch, MinibatchFactory, evaluation_minibatches, make_minibatch
from tests.megatron.arm_cases import LINEAR, masked
from tests.megatron.gpt_cases import CPU, make_samples
from tests.megatron.run_cases import write_dialogues

SAMPLES = make_samples((50, 40, 30, 20, 10), seed=5)


def maker(rank: int = 0, **changed: Any) -> Maker:
    arguments = {"policy": "lb_mini", "cost_model": LINEAR, "max_tokens": 64, "world_size": 2, "device": CPU, **changed}
    return partial(make_minibatch, rank=rank, **arguments)


def make(rank: int = 0, samples: Sequence[Sample] = SAMPLES, **changed: Any) -> Minibatch:
    return maker(rank, **changed)(3, samples)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    folder = tmp_path_factory.mktemp("data")
    params = {"sft_dataset_name": str(write_dialogues(folder / "dialogues.jsonl")), "tokenizer_type": "byte"}
    return build_dataset(params, workspace=folder, max_tokens=128, over_length="error")


@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro", "localsort", "round_robin"])
def test_ranks_share_out_all_samples_and_agree_on_everything_else(policy: str) -> None:
    ranks = [make(rank, policy=policy) for rank in range(2)]
    for rank, minibatch in enumerate(ranks):
        assert minibatch.step == 3 and minibatch.counts[rank] == len(minibatch.microbatches)
        assert minibatch.target_tokens == sum(int(s.target_mask.sum()) for s in SAMPLES)
        assert minibatch.tokens == 150 and minibatch.sample_ids == tuple(s.sample_id for s in SAMPLES)
    assert ranks[0].counts == ranks[1].counts and ranks[0].digest == ranks[1].digest
    run = sorted(length for minibatch in ranks for microbatch in minibatch.microbatches for length in microbatch.packed.lengths)
    assert [length for length in run if length > 1] == [10, 20, 30, 40, 50]
    assert sum(microbatch.num_targets for minibatch in ranks for microbatch in minibatch.microbatches) == ranks[0].target_tokens


def test_a_rank_without_work_is_empty_or_gets_one_padding_token() -> None:
    empty, padded = (make(1, samples=SAMPLES[:1], pad_empty_ranks=pad) for pad in (False, True))
    assert empty.microbatches == () and empty.counts == (1, 0)
    assert padded.counts == (1, 1) and padded.tokens == 50
    assert padded.microbatches[0].packed.lengths == (1,) and padded.microbatches[0].num_targets == 0


def test_digest_tells_what_differs() -> None:
    digests = [
        make().digest,
        make(policy="lb_micro").digest,
        make(max_tokens=50).digest,
        make(samples=SAMPLES[::-1]).digest,
        make(samples=[masked(SAMPLES[0]), *SAMPLES[1:]]).digest,
        make(samples=make_samples((50, 40, 30, 20, 11), seed=5)).digest,
    ]
    assert len(set(digests)) == len(digests)


def test_stream_stands_where_training_is_and_not_where_planning_is(dataset: TokenDataset) -> None:
    stream = MinibatchStream(len(dataset), 5, 1, dataset.fingerprint)
    ids: list[tuple[str, ...]] = []
    with MinibatchFactory(dataset, stream, maker(max_tokens=128), depth=3) as ahead:
        for step in range(6):
            ids.append(ahead.get(step).sample_ids)
            assert stream.consumed_samples == 5 * (step + 1)
        with pytest.raises(ProtocolError):
            ahead.get(8)
    again = MinibatchStream(len(dataset), 5, 1, dataset.fingerprint)
    assert ids == [tuple(dataset.ids[i] for i in again.next()) for _ in range(6)]
    again.fast_forward(15)
    with MinibatchFactory(dataset, again, maker(1, max_tokens=128), first_step=3) as resumed:
        assert [resumed.get(step).sample_ids for step in (3, 4)] == ids[3:5]


def test_planning_errors_reach_the_step(dataset: TokenDataset) -> None:
    stream = MinibatchStream(len(dataset), 5, 1)
    with MinibatchFactory(dataset, stream, maker(max_tokens=8)) as ahead, pytest.raises(PlanError, match="longer than the cap of 8"):
        ahead.get(0)
    assert stream.consumed_samples == 0


def test_evaluation_takes_the_first_samples_once(dataset: TokenDataset) -> None:
    minibatches = evaluation_minibatches(dataset, 2, 4, maker(max_tokens=128))
    assert [m.sample_ids for m in minibatches] == [dataset.ids[:4], dataset.ids[4:8]]
    everything = evaluation_minibatches(dataset, 100, 4, maker(max_tokens=128))
    assert sum(m.target_tokens for m in everything) == np.sum(dataset.target_counts)
    assert sum(len(m.sample_ids) for m in everything) == len(dataset)
