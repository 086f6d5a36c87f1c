"""The output head and the loss in one module: next-token cross entropy, summed over the tokens that count.

Only positions that count reach the head, and their logits exist for one chunk of tokens at a time: with a vocabulary of 65,536 the logits
of 16,000 tokens would be 4 GiB, once more for their gradient. A chunk's gradients are made right after its loss, while its logits are at
hand, and wait (one tensor of the size of the inputs, one of the size of the weight) for backward to scale them. So nothing is computed
twice, unlike with recomputation, and a head that is an FSDP2 module of its own is called, gathered and reduced exactly once a microbatch,
like every other module.

The value is a sum, not a mean: the caller divides by the number of targets of the whole minibatch over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_LOGITS_PER_CHUNK = 2**24  # 64 MiB of fp32


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
            logits = (hidden[part] @ weight.t()).to(wide)
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            total += (log_sum - logits.gather(1, target)).sum()
            if not (for_hidden or for_weight):
                continue
            # softmax - one-hot, in the memory of the logits
            error = logits.sub_(log_sum).exp_().scatter_add_(1, target, torch.full_like(log_sum, -1.0)).to(weight.dtype)
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
        chunk_tokens: how many tokens have logits at once; None: as many as fit 64 MiB of fp32.
        """
        super().__init__()
        self.weight = weight
        self.chunk_tokens = chunk_tokens or max(1, _LOGITS_PER_CHUNK // weight.shape[0])

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
        loss: torch.Tensor = _SummedCrossEntropy.apply(counted, self.weight, targets, self.chunk_tokens, torch.is_grad_enabled())
        return loss
