"""T1: microbatches of (loss sum 2, 1 token) and (loss sum 90, 9 tokens) have the loss 9.2, not the mean of means 6.0.

The two loss sums are made in a real GPT: its layers add nothing to the residual stream, so the hidden state of a token is its normalised
embedding, and the head is chosen so that token A predicts A at a loss of 2 and token B predicts B at a loss of 10. Loss and gradient of
the head follow by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import primus_odc
from primus_odc.data.samples import Sample
from primus_odc.megatron.model import PackedGPT
from tests.cases.gpt_ranks import MODES, TOLERANCE, VERIFIED, full_gradients, reference_gradients, run_minibatch, shard, worst_error
from tests.megatron.gpt_cases import QWEN2, VOCAB, make_model, relative_error
from tests.workers import run_workers

A, B = 5, 11
LOSS = {A: 2.0, B: 10.0}
# [rank][microbatch] -> samples, for every number of ranks and every way to share the two microbatches out.
ASSIGNMENTS: dict[int, list[list[list[list[int]]]]] = {
    1: [[[[0], [1]]], [[[1], [0]]], [[[0, 1]]]],
    2: [[[[0]], [[1]]], [[[1]], [[0]]], [[[0], [1]], []], [[], [[1], [0]]], [[], [[0, 1]]]],
}


def _samples() -> list[Sample]:
    """[A A] has one target; [B B B B B B B B B B] has nine."""
    return [
        Sample(sample_id=str(token), tokens=np.full(n + 1, token, dtype=np.int32), target_mask=np.arange(n + 1) > 0)
        for token, n in ((A, 1), (B, 9))
    ]


def _model() -> tuple[PackedGPT, dict[int, float]]:
    """The model, and the hidden state of A and B: one number, at the channel of the token's own."""
    model = make_model(QWEN2)
    hidden = {}
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.self_attention.linear_proj.weight.zero_()
            layer.mlp.linear_fc2.weight.zero_()
        embedding, head = model.embedding.word_embeddings.weight, model.output_layer.weight
        head.zero_()
        for token in (A, B):
            channel = token  # any, another one for each
            embedding[token] = torch.zeros(QWEN2["hidden_size"])
            embedding[token, channel] = 1.0
            rms = math.sqrt(1.0 / QWEN2["hidden_size"] + QWEN2["norm_epsilon"])
            hidden[token] = float(model.decoder.final_layernorm.weight[channel]) / rms
            # Logit d for the token itself and 0 for the others: loss = log(1 + (VOCAB - 1) exp(-d)).
            head[token, channel] = math.log((VOCAB - 1) / math.expm1(LOSS[token])) / hidden[token]
    return model, hidden


def _head_gradient_by_hand(hidden: dict[int, float]) -> torch.Tensor:
    """(softmax - one-hot) times hidden state, over 10 tokens: 1 of A, 9 of B."""
    gradient = torch.zeros(VOCAB, QWEN2["hidden_size"], dtype=torch.float64)
    for token, count in ((A, 1), (B, 9)):
        own = math.exp(-LOSS[token])
        gradient[:, token] = (1 - own) / (VOCAB - 1) * hidden[token] * count / 10
        gradient[token, token] = (own - 1) * hidden[token] * count / 10
    return gradient


def _losses(rank: int, world_size: int) -> list[float]:
    samples = _samples()
    model, hidden = _model()
    expected = reference_gradients(model.state_dict(), samples)
    assert relative_error(expected["output_layer.weight"], _head_gradient_by_hand(hidden)) <= TOLERANCE
    shard(model)
    losses = []
    for mode in (*MODES, VERIFIED):
        engine = primus_odc.attach(model, **mode)
        for assignment in ASSIGNMENTS[world_size]:
            loss = torch.tensor(run_minibatch(engine, model, samples, assignment[rank]), dtype=torch.float64)
            gradients = full_gradients(model)
            assert relative_error(gradients["output_layer.weight"], _head_gradient_by_hand(hidden)) <= TOLERANCE
            assert worst_error(model, expected) <= TOLERANCE
            dist.all_reduce(loss)
            losses.append(float(loss))
        engine.detach()
    return losses


@pytest.mark.parametrize("world_size", ASSIGNMENTS)
def test_the_loss_is_9_2(world_size: int) -> None:
    for losses in run_workers(_losses, world_size):
        assert losses == pytest.approx([9.2] * len(losses), rel=TOLERANCE)
