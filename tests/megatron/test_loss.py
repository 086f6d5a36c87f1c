from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from primus_odc.megatron.loss import CrossEntropyHead, chunk_size
from tests.megatron.gpt_cases import relative_error

TOKENS, HIDDEN, VOCAB = 40, 6, 50


def case(dtype: torch.dtype, chunk_tokens: int | None) -> tuple[CrossEntropyHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(head, hidden, positions that count, targets)"""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype))
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(dtype).requires_grad_()
    counted = torch.randperm(TOKENS, generator=generator)[:23].sort().values
    return CrossEntropyHead(weight, chunk_tokens), hidden, counted, torch.randint(0, VOCAB, (23,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 1000, None])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_equal_torchs_cross_entropy(dtype: torch.dtype, tolerance: float, chunk_tokens: int | None) -> None:
    head, hidden, counted, targets = case(dtype, chunk_tokens)
    loss = head(hidden, counted, targets)
    (loss / 23).backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide_hidden, wide_weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    expected = F.cross_entropy(wide_hidden[counted, 0] @ wide_weight.T, targets, reduction="sum")
    (expected / 23).backward()
    assert wide_hidden.grad is not None and wide_weight.grad is not None and hidden.grad is not None and head.weight.grad is not None
    assert hidden.grad.dtype == head.weight.grad.dtype == dtype
    assert relative_error(loss, expected) <= tolerance
    assert relative_error(hidden.grad, wide_hidden.grad) <= tolerance
    assert relative_error(head.weight.grad, wide_weight.grad) <= tolerance


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    head, hidden, counted, targets = case(torch.float32, 4)
    with Largest() as largest:
        head(hidden, counted, targets).backward()
    assert largest.numel == max(4 * VOCAB, VOCAB * HIDDEN, TOKENS * HIDDEN)


def test_no_target_gives_zero_and_zero_gradients() -> None:
    head, hidden, counted, targets = case(torch.float32, None)
    loss = head(hidden, counted[:0], targets[:0])
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_frozen_parts_get_no_gradient() -> None:
    head, hidden, counted, targets = case(torch.float32, 5)
    head.weight.requires_grad_(False)
    head(hidden, counted, targets).backward()
    frozen = hidden.grad
    head.weight.requires_grad_(True)
    hidden.grad = None
    head(hidden, counted, targets).backward()
    assert frozen is not None and hidden.grad is not None and torch.equal(frozen, hidden.grad)
    assert head.weight.grad is not None


def test_a_second_backward_is_refused() -> None:
    head, hidden, counted, targets = case(torch.float32, None)
    loss = head(hidden, counted, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


@pytest.mark.parametrize("vocabulary", [97, 65536, 151936])
@pytest.mark.parametrize("tokens", [1, 5000, 65536])
def test_chunks_are_few_and_of_one_size(tokens: int, vocabulary: int) -> None:
    assert chunk_size(tokens, vocabulary, "cpu") * vocabulary * 4 <= 64 * 2**20
    size = chunk_size(tokens, vocabulary, "cuda")
    assert size % 128 == 0
    assert size == 128 or size * vocabulary * 4 <= 2 * 2**30
    chunks = -(-tokens // size)
    assert chunks == -(-tokens // max(size, 2**29 // vocabulary // 128 * 128)), "no more chunks than the limit asks for"
    assert chunks * size - tokens < chunks * 128 + 128


def test_a_confident_prediction_keeps_its_small_gradient() -> None:
    """p = 1 - 1e-4 is 1 in bf16, and its gradient p - 1 would be lost."""
    weight = torch.nn.Parameter(torch.tensor([[9.2], [0.0]], dtype=torch.bfloat16))
    hidden = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    CrossEntropyHead(weight)(hidden, torch.tensor([0]), torch.tensor([0])).backward()
    p = torch.sigmoid(weight.detach()[0, 0].double())
    assert weight.grad is not None and float(weight.grad[0, 0]) == pytest.approx(float(p - 1), rel=5e-3)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 5000, 65536])
def test_on_a_gpu_a_large_vocabulary_fits_and_nothing_waits(tokens: int) -> None:
    gpu, vocabulary, size = torch.device("cuda"), 151936, 1536
    weight = torch.nn.Parameter(torch.randn(vocabulary, size, device=gpu, dtype=torch.bfloat16) * 0.02)
    hidden = torch.randn(tokens, 1, size, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    counted, targets = torch.arange(tokens, device=gpu), torch.randint(0, vocabulary, (tokens,), device=gpu)
    head = CrossEntropyHead(weight)
    (head(hidden, counted, targets) / tokens).backward()  # libraries are initialised
    weight.grad = hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = head(hidden, counted, targets)
        (loss / tokens).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 10 * 2**30, "5 GiB for a chunk, 2 for the weight's gradient, the inputs"
    assert weight.grad is not None and hidden.grad is not None
    few = slice(0, 256)
    logits = (hidden.detach()[few, 0].float() @ weight.detach().float().t()).requires_grad_()
    expected = F.cross_entropy(logits, targets[few], reduction="sum")
    (error,) = torch.autograd.grad(expected / tokens, logits)
    assert relative_error(hidden.grad[few, 0], error @ weight.detach().float()) < 2e-2
    if tokens <= 256:
        assert relative_error(loss, expected) < 1e-3
        assert relative_error(weight.grad, error.t() @ hidden.detach()[few, 0].float()) < 2e-2
