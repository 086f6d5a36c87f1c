"""The output head and the loss in one module: next-token cross entropy, summed over the tokens that count.

Only positions that count reach the head, and their logits exist for one chunk of tokens at a time: with a vocabulary of 151,936 the logits
of 64,000 tokens would be 36 GiB of fp32, once more for their gradient. A chunk's gradients are made right after its loss, while its logits
are at hand, and wait (one tensor of the size of the inputs, one of the size of the weight) for backward to scale them. So nothing is
computed twice, unlike with recomputation, and a head that is an FSDP2 module of its own is called, gathered and reduced exactly once a
microbatch, like every other module.

The gradient of the weight adds up in fp32 over the chunks of a microbatch and is rounded to the weight's dtype once. Nothing is read back
from the device.

The value is a sum, not a mean: the caller divides by the number of targets of the whole minibatch over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# On a CPU 64 MiB of fp32, not far from the caches. On a GPU 2 GiB, so that the matrix products are large and adding a chunk's part of the
# weight's gradient, which moves that whole tensor, is a few per cent of them; with the copies softmax needs about 5 GiB for a moment.
_LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**29}
_TILE = 128  # tokens: rows that GPU kernels compute together


def chunk_size(tokens: int, vocabulary: int, device_type: str) -> int:
    """Tokens of a chunk: as few chunks as the limit of ``device_type`` allows, of about the same size, on a GPU in whole tiles."""
    most = max(1, _LOGITS_PER_CHUNK[device_type] // vocabulary)
    if device_type == "cpu":
        return most
    most = max(_TILE, most // _TILE * _TILE)
    even = -(-tokens // max(1, -(-tokens // most)))
    return max(_TILE, -(-even // _TILE) * _TILE)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_tokens: int, with_gradients: bool
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        for_hidden, for_weight = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            target = targets[part, None]
            log_probability = torch.log_softmax(hidden[part] @ weight.t(), dim=1, dtype=wide)
            of_target = log_probability.gather(1, target)
            total -= of_target.sum()
            if not (for_hidden or for_weight):
                continue
            # softmax - one-hot, in the memory of the logarithms; the targets' own entries first, while small differences from 1 exist
            error = log_probability.exp_().scatter_(1, target, of_target.expm1_()).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(error, weight, out=grad_hidden[part])
            if grad_weight is not None and grad_weight.dtype == error.dtype:
                grad_weight.addmm_(error.t(), hidden[part])
            elif grad_weight is not None:
                grad_weight += error.t() @ hidden[part]
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were already used by an earlier backward; run forward again")
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None  # scaled in place below, so they serve once
        if grad_hidden is not None:
            grad_hidden.mul_(scale)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


class CrossEntropyHead(torch.nn.Module):
    """Output projection without bias, followed by the summed cross entropy."""

    def __init__(self, weight: torch.nn.Parameter, chunk_tokens: int | None = None) -> None:
        """Args:
        weight: [vocabulary, hidden size]
        chunk_tokens: how many tokens have logits at once; None: :func:`chunk_size`.
        """
        super().__init__()
        self.weight = weight
        self.chunk_tokens = chunk_tokens
        self.vocabulary = weight.shape[0]  # FSDP2 replaces the weight by a part of it

    def forward(self, hidden: torch.Tensor, target_index: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed cross entropy of the targets.

        Args:
            hidden: [T, 1, hidden size], the last block's output after the final norm.
            target_index: int64 [n], positions that count; n may be 0.
            targets: int64 [n], the token to be predicted at each of them.

        Returns:
            fp32 scalar (fp64 for fp64 parameters), 0 for n = 0; its gradient reaches every parameter, with zeros for n = 0.
        """
        counted = hidden.squeeze(1).index_select(0, target_index)
        chunk = self.chunk_tokens or chunk_size(counted.shape[0], self.vocabulary, counted.device.type)
        loss: torch.Tensor = _SummedCrossEntropy.apply(counted, self.weight, targets, chunk, torch.is_grad_enabled())
        return loss
