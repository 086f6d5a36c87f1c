"""A benchmark is worth nothing if an arm is fast because it computes something else: loss and gradient norm must be those of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from primus_odc.bench.summary import Step, grad_norm, loss
from primus_odc.errors import VerificationError

LOSS_BOUND, NORM_BOUND = 1e-3, 2e-2
"""Relative. What bf16 and other orders of summation make of loss and gradient norm stays well below."""


def require_agreement(point: str, steps: Mapping[str, Sequence[Step]]) -> None:
    """Compare every arm with the first, minibatch by minibatch; ``steps`` are those of arms with the same weights and data.

    Raises:
        VerificationError: naming ``point``, minibatch, arm and both values.
    """
    names = list(steps)
    for arm in names[1:]:
        for own, reference in zip(steps[arm], steps[names[0]], strict=True):
            for what, value, bound in (("loss", loss, LOSS_BOUND), ("gradient norm", grad_norm, NORM_BOUND)):
                if not math.isclose(value(own), value(reference), rel_tol=bound):
                    raise VerificationError(
                        f"{point}, minibatch {own['minibatch']}: the {what} is {value(own):.8g} in {arm} and {value(reference):.8g} in "
                        f"{names[0]}: one of them computes something else (allowed: {bound:g} relative)"
                    )
