"""What a sample and a microbatch cost.

A sample of t tokens costs ``per_token * t + per_token_squared * t**2``: the linear part is every matrix multiplication, the square is
causal attention, which never crosses sample borders. A microbatch costs the sum of its samples plus ``fixed``, the part that does not
shrink with the data (launches, per-layer communication calls). The unit is free, because plans and predictions only compare costs, but all
three terms share it; users give the fixed part as a number of tokens, ``microbatch_cost``, whatever the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from primus_odc.errors import PlanError

LONGEST = 2**40
"""Tokens above which a number of them is none."""
LARGEST = 1e200
"""Cost of a token above which sums of samples' costs come near the end of 64 bits of floating point."""

ATTENTION_TOKENS = 32000
"""Tokens of one unit of s in the fits ``a * s**2 + b * s``."""

QWEN_1_5B_FIT = (1.982122, 2.611821)
"""(a, b) of DeepSeek-R1-Distill-Qwen-1.5B, as published by the authors of ODC."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CostModel:
    """Cost of samples and microbatches as a function of their token counts."""

    name: str
    """Shown in reports."""

    per_token: float
    """Cost of one token outside attention."""

    per_token_squared: float = 0.0
    """Cost of attention: multiplied by the square of a sample's tokens."""

    fixed: float = 0.0
    """Cost of one microbatch whatever it holds, in the unit of the other two."""

    def __post_init__(self) -> None:
        for field in ("per_token", "per_token_squared", "fixed"):
            value = getattr(self, field)
            if not 0 <= value <= LARGEST:
                raise PlanError(f"cost model {self.name!r}: {field} is {value}; it must be a number from 0 to {LARGEST:g}")
        if self.per_token == 0 and self.per_token_squared == 0:
            raise PlanError(f"cost model {self.name!r}: a and b are both 0, so every sample would cost nothing; give at least one of them")

    @classmethod
    def from_config(cls, spec: str | Sequence[float], *, microbatch_cost: float = 0.0) -> CostModel:
        """Make the model that ``odc.cost_model`` and ``odc.microbatch_cost`` describe.

        Args:
            spec: ``"linear"`` (cost = tokens), ``"attention"`` (the published 1.5B fit) or ``(a, b)`` of the caller's own fit
                ``a * s**2 + b * s`` with s = tokens / 32000. Only the ratio of a and b matters.
            microbatch_cost: what a microbatch costs beside its samples: as much as so many tokens outside attention.

        Raises:
            PlanError: an unknown name, not two coefficients, one that is negative or too large, or a fixed cost where tokens have none.
        """
        if spec == "linear":
            return cls(name="linear", per_token=1.0)._with_fixed(microbatch_cost)
        if spec == "attention":
            return cls._from_fit("attention", *QWEN_1_5B_FIT)._with_fixed(microbatch_cost)
        if isinstance(spec, str) or len(spec) != 2:
            raise PlanError(f"cost_model is {spec!r}; use linear, attention or two coefficients [a, b]")
        a, b = (float(value) for value in spec)
        return cls._from_fit(f"[{a:g}, {b:g}]", a, b)._with_fixed(microbatch_cost)

    @classmethod
    def _from_fit(cls, name: str, a: float, b: float) -> CostModel:
        return cls(name=name, per_token=b / ATTENTION_TOKENS, per_token_squared=a / ATTENTION_TOKENS**2)

    def _with_fixed(self, tokens: float) -> CostModel:
        """The same where a microbatch costs as much as ``tokens`` tokens outside attention on top.

        Raises:
            PlanError: ``tokens`` is negative or too large, or tokens have no cost.
        """
        if not 0.0 <= tokens <= LONGEST:
            raise PlanError(
                f"the fixed cost of a microbatch (odc.microbatch_cost, --microbatch-cost, --fixed-tokens) is {tokens:g} tokens; it must be "
                f"a number from 0 to {LONGEST}"
            )
        if tokens and not self.per_token:
            raise PlanError(f"cost model {self.name!r}: a fixed cost in tokens has no meaning where b, the cost of a token, is 0")
        return replace(self, fixed=tokens * self.per_token)

    @classmethod
    def from_model_shape(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        vocab_size: int,
        kv_channels: int | None = None,
        gated_mlp: bool = True,
        recompute: bool = False,
        microbatch_cost: float = 0.0,
    ) -> CostModel:
        """Count the FLOPs of one forward and backward of a decoder-only transformer, so that no fit is needed.

        A multiply-add is two FLOPs, backward is twice a forward, causal attention computes half of the square.

        Args:
            num_query_groups: key and value heads (grouped-query attention).
            kv_channels: size of one head; ``None`` means hidden_size / num_attention_heads.
            gated_mlp: SwiGLU-like, three matrices instead of two.
            recompute: full activation recompute, which runs every layer forward once more (not the output head).
            microbatch_cost: see :meth:`from_config`.
        """
        head_dim = kv_channels if kv_channels is not None else hidden_size // num_attention_heads
        query_size, key_value_size = num_attention_heads * head_dim, num_query_groups * head_dim
        layer_weights = hidden_size * (2 * query_size + 2 * key_value_size + (3 if gated_mlp else 2) * ffn_hidden_size)
        passes = 4 if recompute else 3
        return cls(
            name="flops",
            per_token=2.0 * (passes * num_layers * layer_weights + 3 * hidden_size * vocab_size),
            per_token_squared=2.0 * passes * num_layers * query_size,
        )._with_fixed(microbatch_cost)

    @property
    def fixed_tokens(self) -> float:
        """``fixed`` as a number of tokens outside attention."""
        return self.fixed / self.per_token if self.fixed else 0.0

    def sample_costs(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Cost of every sample by itself, without ``fixed``; same shape as ``lengths`` (tokens)."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.per_token * tokens + self.per_token_squared * (tokens * tokens)

    def microbatch_cost(self, lengths: npt.ArrayLike) -> float:
        """Cost of a microbatch holding samples of these lengths; without any it holds one padding token."""
        tokens = np.asarray(lengths, dtype=np.int64)
        return self.fixed + math.fsum(self.sample_costs(tokens if tokens.size else [1]))
