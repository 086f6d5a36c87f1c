"""What the numbers mean, in sentences; the terminal and the page say the same. Losses are worded as plainly as wins."""

from __future__ import annotations

from dataclasses import dataclass

from primus_odc.report.result import ArmResult, ComparisonResult
from primus_odc.report.stats import LAST, last_mean, median, paired_ratios, quartiles

NOISE = 0.01
"""A median ratio within one per cent of 1 is called equal."""
AGREEMENT_BOUND = 1e-5
"""The relative loss difference that arms keep in fp32."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rung:
    """One line of the ladder: a level, or a part that leads from one level to the next."""

    name: str
    ms: float
    level: bool
    """True: ``ms`` is the time of a step. False: ``ms`` is taken off by the step down; negative means that time was added."""
    meaning: str = ""


def rungs(result: ComparisonResult) -> list[Rung]:
    """The ladder from top to bottom; empty without one. Parts between two levels add up to their difference."""
    ladder = result.ladder
    if ladder is None:
        return []
    split = ladder.split
    lines = [Rung(name="nccl_pad", ms=ladder.nccl_pad_ms, level=True)]
    if split is None:
        lines.append(Rung(name="communication", ms=ladder.nccl_pad_ms - ladder.odc_pad_ms, level=False, meaning="same plan, on demand"))
    else:
        library = f"{collective_library(result)} {'slower' if split.library_ms >= 0 else 'FASTER'} than on-demand transfers"
        lines.append(Rung(name="removed waiting", ms=split.waiting_ms, level=False, meaning="no meeting after every microbatch"))
        lines.append(Rung(name="collective library", ms=split.library_ms, level=False, meaning=library))
    lines.append(Rung(name="odc_pad", ms=ladder.odc_pad_ms, level=True))
    if split is None:
        lines.append(Rung(name="plan", ms=ladder.odc_pad_ms - ladder.odc_nopad_ms, level=False, meaning="each rank its own count"))
    else:
        lines.append(Rung(name="removed padding", ms=split.plan_ms, level=False, meaning="balanced over the whole minibatch"))
        lines.append(Rung(name="other effects of the plan", ms=split.plan_rest_ms, level=False, meaning="fewer or more transfers"))
    lines.append(Rung(name="odc_nopad", ms=ladder.odc_nopad_ms, level=True))
    if ladder.ideal_ms is not None and ladder.remaining_ms is not None:
        lines.append(Rung(name="remaining", ms=ladder.remaining_ms, level=False, meaning="communication and waiting that are left"))
        lines.append(Rung(name="ideal", ms=ladder.ideal_ms, level=True, meaning="no communication"))
    return lines


def collective_library(result: ComparisonResult) -> str:
    """Name of what ran the collectives, from the machine's facts: gloo where there is no accelerator."""
    name = result.machine.get("collectives")
    if isinstance(name, str):
        return name
    return "NCCL/RCCL" if result.machine.get("accelerators") else "gloo"


def speed_sentence(result: ComparisonResult, arm: str) -> str:
    """How an arm did against the baseline, with quartiles."""
    ratio, (low, high) = result.speedup[arm], result.spread[arm]
    inside = f"middle half of the steps {low:.2f} to {high:.2f}"
    if abs(ratio - 1.0) <= NOISE:
        return f"{arm} takes as long as {result.baseline} (ratio {ratio:.3f}; {inside})."
    if ratio > 1.0:
        return f"{arm} is {ratio:.2f} times as fast as {result.baseline} ({inside})."
    return f"{arm} is SLOWER than {result.baseline}: its steps take {1.0 / ratio:.2f} times as long (ratio {ratio:.2f}; {inside})."


def ladder_sentence(result: ComparisonResult) -> str | None:
    """What the difference between nccl_pad and odc_nopad is made of; None without a split."""
    ladder = result.ladder
    if ladder is None or ladder.split is None:
        return None
    split = ladder.split
    total = ladder.nccl_pad_ms - ladder.odc_nopad_ms
    parts = (
        (split.waiting_ms, "removed waiting"),
        (split.plan_ms, "removed padding and imbalance"),
        (
            split.library_ms,
            f"only {collective_library(result)} being {'slow' if split.library_ms >= 0 else 'faster than on-demand transfers'}",
        ),
        (split.plan_rest_ms, "other effects of the plan"),
    )
    listed = ", ".join(f"{_signed(ms)} ms {name}" for ms, name in parts)
    verb = "saves" if total >= 0 else "LOSES"
    waiting, plan = (f"{_signed(low)} to {_signed(high)}" for low, high in (split.waiting_quartiles, split.plan_quartiles))
    return (
        f"From nccl_pad to odc_nopad a step {verb} {_ms(abs(total))} ms: {listed}. The middle half of the steps has "
        f"{waiting} ms of waiting and {plan} ms of padding; the other two parts are what is left over, noise included."
    )


def sentences(result: ComparisonResult) -> list[str]:
    """All that is to be said, most important first."""
    said = [speed_sentence(result, arm) for arm in sorted(result.speedup, key=lambda arm: arm != "odc_nopad")]
    if "odc_pad" in result and "odc_nopad" in result:
        said.append(_plan_sentence(result))
    if "odc_nopad" in result.ideal_share:
        said.append(f"odc_nopad reaches {100 * result.ideal_share['odc_nopad']:.1f} % of the speed without any communication.")
    split = ladder_sentence(result)
    if split is not None:
        said.append(split)
    elif result.ladder is not None:
        said.append("What the ladder's rungs are made of is not known: compute times per microbatch were not recorded.")
    if result.agreement:
        said.append(agreement_sentence(result))
    said.append(loss_sentence(result[result.baseline]))
    skipped = result.arms[0].skipped_steps
    left_out = ["the first step" if result.warmup_steps == 1 else f"the first {result.warmup_steps} steps"] if result.warmup_steps else []
    left_out += [f"{_steps(len(skipped))} without a target"] if skipped else []
    said.append(
        f"Measured over {_steps(len(result.steps))}{'; left out: ' if left_out else ''}{' and '.join(left_out)}. Times are medians "
        "[quartiles], ratios are taken step by step."
    )
    return said


def _plan_sentence(result: ComparisonResult) -> str:
    """odc_nopad against odc_pad: the same transfers, another plan."""
    ratios = paired_ratios(result["odc_pad"].ms_per_step, result["odc_nopad"].ms_per_step, result.steps)
    ratio, (low, high) = median(ratios), quartiles(ratios)
    inside = f"ratio {ratio:.3f}, middle half of the steps {low:.3f} to {high:.3f}"
    if len(ratios) > 1 and low <= 1.0 <= high:
        return f"odc_nopad and odc_pad do not differ by more than their steps do ({inside})."
    return f"odc_nopad is {'faster' if ratio > 1.0 else 'SLOWER'} than odc_pad ({inside})."


def agreement_sentence(result: ComparisonResult) -> str:
    """Whether the arms learnt the same thing."""
    worst = max(result.agreement, key=lambda arm: result.agreement[arm])
    difference = result.agreement[worst]
    if difference == 0.0:
        return f"Losses of all arms equal those of {result.baseline} exactly at every step."
    if difference <= AGREEMENT_BOUND:
        return f"Losses of all arms agree with {result.baseline} to {difference:.1e} relative at every step (worst: {worst})."
    return (
        f"Losses DIFFER: {worst} is up to {difference:.1e} relative away from {result.baseline}. In fp32 more than {AGREEMENT_BOUND:.0e} "
        "means that the arms did not train the same thing; lower precisions round more."
    )


def loss_sentence(arm: ArmResult) -> str:
    """Where the loss started and ended."""
    present = [value for value in arm.loss if value is not None]
    end = last_mean(arm.loss)
    if not present or end is None:
        return f"{arm.arm} has no loss: every minibatch was skipped."
    if len(present) == 1:
        return f"Loss of {arm.arm}: {present[0]:.4f} at its only step."
    over = f"the last {LAST} steps" if len(present) > LAST else f"all {len(present)} steps"
    return f"Loss of {arm.arm}: {present[0]:.4f} at the first step, {end:.4f} over {over} ({end / present[0]:.2f} of it)."


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _signed(ms: float) -> str:
    return ("+" if ms >= 0 else "-") + _ms(abs(ms))


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
