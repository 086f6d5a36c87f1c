from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_odc.data.packing import pack_microbatch
from primus_odc.errors import ConfigError, ProtocolError
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.megatron.model import build_gpt, build_gpt_without_weights, draw_weights
from tests.megatron.gpt_cases import CPU, GPT2, PARTLY_ROTATED, QWEN2, VOCAB, gradients, make_model, make_samples, relative_error
from tests.reference_gpt import reference_hidden, reference_loss_and_gradients

pytestmark = pytest.mark.usefixtures("one_rank")
LENGTHS = (23, 1, 40, 7)


@pytest.mark.parametrize("params", [QWEN2, GPT2, PARTLY_ROTATED], ids=["qwen2", "gpt2", "partly_rotated"])
def test_packed_fp32_gradients_equal_the_fp64_reference(params: dict[str, Any]) -> None:
    model, samples = make_model(params), make_samples(LENGTHS)
    microbatch = Microbatch.of(pack_microbatch(samples), CPU)
    loss = model(microbatch)
    (loss / microbatch.num_targets).backward()
    expected_loss, expected, targets = reference_loss_and_gradients(model.state_dict(), params, samples)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert microbatch.num_targets == targets
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name] / targets) for name in expected}
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_a_packed_microbatch_equals_its_samples_alone(dtype: torch.dtype, tolerance: float) -> None:
    model, samples = make_model(QWEN2, dtype), make_samples(LENGTHS)
    packed = model(Microbatch.of(pack_microbatch(samples), CPU))
    packed.backward()
    together = gradients(model)
    model.zero_grad()
    losses = [model(Microbatch.of(pack_microbatch([sample]), CPU)) for sample in samples]
    alone = torch.stack(losses).sum()
    alone.backward()
    assert relative_error(packed, alone) <= tolerance
    assert max(relative_error(together[name], grad) for name, grad in gradients(model).items()) <= tolerance


def test_a_sample_does_not_feel_what_it_is_packed_with() -> None:
    model, samples, others = make_model(QWEN2), make_samples(LENGTHS), make_samples(LENGTHS, seed=1)
    seen: list[torch.Tensor] = []
    model.decoder.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for neighbours in (samples, others):
        model(Microbatch.of(pack_microbatch([neighbours[0], neighbours[1], samples[2], neighbours[3]]), CPU))
    start, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    assert torch.equal(seen[0][start:end], seen[1][start:end])
    assert not torch.equal(seen[0][:start], seen[1][:start])
    weights = {k: v.double() for k, v in model.state_dict().items() if v is not None}
    expected = reference_hidden(weights, QWEN2, torch.from_numpy(samples[2].tokens).long())
    assert relative_error(seen[0][start:end, 0], expected) <= 1e-6


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    ],
    ids=["every_layer", "first_layer", "attention"],
)
def test_recomputation_changes_no_bit_and_keeps_less(recompute: dict[str, Any]) -> None:
    results, kept = [], []
    for params in (QWEN2, {**QWEN2, **recompute}):
        model, saved = make_model(params), {0: 0}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(Microbatch.of(pack_microbatch(make_samples(LENGTHS)), CPU))
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
        kept.append(sum(saved.values()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert kept[1] < kept[0]


def test_the_empty_bucket_gives_zero_gradients_everywhere() -> None:
    model = make_model(QWEN2)
    microbatch = Microbatch.of(pack_microbatch([]), CPU)
    loss = model(microbatch)
    loss.backward()
    assert loss.item() == 0.0 and microbatch.num_targets == 0
    assert all(not grad.any() for grad in gradients(model).values())


def test_evaluation_builds_no_graph() -> None:
    model, microbatch = make_model(GPT2), Microbatch.of(pack_microbatch(make_samples(LENGTHS)), CPU)
    trained = model(microbatch)
    with torch.no_grad():
        evaluated = model(microbatch)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, trained.detach())


def test_weights_depend_on_the_seed_alone_and_no_generator_is_disturbed() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = build_gpt(QWEN2, VOCAB, device=CPU).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    second = build_gpt(QWEN2, VOCAB, device=CPU).state_dict()
    other = build_gpt({**QWEN2, "seed": 8}, VOCAB, device=CPU).state_dict()
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert all(torch.equal(first[k], second[k]) for k in first if first[k] is not None)
    assert not torch.equal(first[name], other[name])
    # Megatron's scaled initialisation of what is added to the residual stream
    assert first[name].std().item() == pytest.approx(0.1 / (2 * 2) ** 0.5, rel=0.1)


def test_every_reason_against_a_model_is_given_at_once() -> None:
    wrong = {**QWEN2, "tensor_model_parallel_size": 2, "attention_dropout": 0.1, "fp16": True}
    with pytest.raises(ConfigError) as caught:
        build_gpt(wrong, VOCAB, device=CPU)
    assert len(caught.value.problems) == 3


def test_torch_distributed_must_be_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ProtocolError, match=r"initialise torch\.distributed"):
        build_gpt(QWEN2, VOCAB, device=CPU)


@pytest.mark.parametrize("params", [QWEN2, GPT2], ids=["qwen2", "gpt2"])
def test_weights_drawn_in_place_have_the_distribution_of_the_built_ones(params: dict[str, Any]) -> None:
    wide = {**params, "hidden_size": 256, "ffn_hidden_size": 384}
    built, drawn = build_gpt(wide, VOCAB, device=CPU), build_gpt_without_weights(wide, VOCAB)
    assert all(parameter.is_meta for parameter in drawn.parameters())
    draw_weights(drawn, CPU, seed=3)
    assert [name for name, _ in drawn.named_parameters()] == [name for name, _ in built.named_parameters()]
    for (name, own), expected in zip(drawn.named_parameters(), built.parameters(), strict=True):
        assert own.shape == expected.shape and own.dtype == expected.dtype, name
        if own.ndim == 1:
            assert torch.equal(own, expected), name
        else:
            assert abs(float(own.std() / expected.std()) - 1) < 0.05 and abs(float(own.mean())) < float(own.std()) / 20, name
    microbatch = Microbatch.of(pack_microbatch(make_samples((9, 4))), CPU)
    assert drawn(microbatch).item() == pytest.approx(microbatch.num_targets * math.log(VOCAB), rel=0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    gpu = torch.device("cuda")
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = build_gpt({**QWEN2, "hidden_size": 256, **recomputed}, VOCAB, device=gpu, dtype=torch.bfloat16)
    arrays = pack_microbatch(make_samples(LENGTHS))
    model(Microbatch.of(arrays, gpu)).backward()  # libraries are initialised, angles made
    torch.cuda.set_sync_debug_mode("error")
    try:
        microbatch = Microbatch.of(arrays, gpu)
        loss = model(microbatch)
        (loss / microbatch.num_targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = build_gpt({**QWEN2, "hidden_size": 256}, VOCAB, device=CPU)
    expected = reference(Microbatch.of(arrays, CPU))
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
