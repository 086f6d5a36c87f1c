"""Whether all arms learnt the same thing: their losses, step by step."""

from __future__ import annotations

from primus_odc.report.result import ComparisonResult
from primus_odc.report.stats import relative_differences
from primus_odc.report.wording import AGREEMENT_BOUND


def disagreements(result: ComparisonResult, bound: float = AGREEMENT_BOUND) -> list[str]:
    """One sentence for each arm whose loss differs from the baseline's by more than ``bound`` relative, with the first such step and the
    worst; none for a run in lower precision than fp32, which rounds more than that."""
    if result.config.get("bf16"):
        return []
    baseline = result[result.baseline]
    sentences = []
    for arm in result.arms:
        differences = relative_differences(arm.loss, baseline.loss)
        far = [(step, difference) for step, difference in enumerate(differences) if difference is not None and difference > bound]
        if far:
            first, difference = far[0]
            sentences.append(
                f"{arm.arm} does not agree with {baseline.arm}: at step {first} its loss is {arm.loss[first]!r} instead of "
                f"{baseline.loss[first]!r}, {difference:.1e} relative (allowed: {bound:.0e}); {len(far)} steps are too far apart, the "
                f"worst by {max(d for _, d in far):.1e}"
            )
    return sentences
