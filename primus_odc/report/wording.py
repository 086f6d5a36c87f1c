"""What the numbers mean, in sentences; the terminal and the page say the same. Losses are worded as plainly as wins.

Whatever compares two arms here was taken step by step (a ratio, or a difference in milliseconds) before its median and quartiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primus_odc._words import counted
from primus_odc.report.ladder import Part
from primus_odc.report.result import ArmResult, ComparisonResult
from primus_odc.report.stats import LAST, last_mean, median, paired_ratios, quartiles

NOISE = 0.01
"""A median ratio within one per cent of 1 is called equal."""
FEW_STEPS = 5
"""Fewer measured steps have quartiles that say nothing."""
AGREEMENT_BOUND = 1e-5
"""The relative loss difference that arms keep in fp32."""
TABLE_DEFINITION = (
    "ms/step and tokens/s: median [quartiles] of the steps. speed-up, of ideal: the ratio in every step, then the median, which is not the "
    "ratio of two medians. idle: of all measured time, per rank."
)
LADDER_DEFINITION = (
    "Arms: median of the steps. Between them: the difference in every step, then the median [quartiles]; medians need not add up."
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Rung:
    """One line of the ladder: a level, or a part that leads from one level to the next."""

    name: str
    ms: float
    quartiles: Sequence[float] | None = None
    """None: a level, ``ms`` is the median time of a step. Else a part, and ``ms`` and these are what the step down takes off, step by step;
    negative means that time was added."""
    meaning: str = ""

    @property
    def level(self) -> bool:
        """Whether it is a level."""
        return self.quartiles is None


def rungs(result: ComparisonResult) -> list[Rung]:
    """The ladder from top to bottom; empty without one."""
    ladder = result.ladder
    if ladder is None:
        return []
    split = ladder.split
    lines = [Rung(name="nccl_pad", ms=ladder.nccl_pad_ms)]
    if split is None:
        lines.append(_step("communication", ladder.communication, "same plan, on demand"))
    else:
        library = f"{collective_library(result)} {'slower' if split.library.ms >= 0 else 'FASTER'} than on demand"
        lines.append(_step("removed waiting", split.waiting, "no meeting after every microbatch"))
        lines.append(_step("collective library", split.library, library))
    lines.append(Rung(name="odc_pad", ms=ladder.odc_pad_ms))
    if split is None:
        lines.append(_step("plan", ladder.plan, "each rank its own count"))
    else:
        lines.append(_step("removed padding", split.plan, "balanced over the whole minibatch"))
        lines.append(_step("other effects of the plan", split.plan_rest, "fewer or more transfers"))
    lines.append(Rung(name="odc_nopad", ms=ladder.odc_nopad_ms))
    if ladder.ideal_ms is not None and ladder.remaining is not None:
        lines.append(_step("remaining", ladder.remaining, "communication and waiting left"))
        lines.append(Rung(name="ideal", ms=ladder.ideal_ms, meaning="no communication"))
    return lines


def _step(name: str, part: Part, meaning: str) -> Rung:
    return Rung(name=name, ms=part.ms, quartiles=part.quartiles, meaning=meaning)


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
    library = "slow" if split.library.ms >= 0 else "faster than on-demand transfers"
    parts = (
        (split.waiting, "removed waiting"),
        (split.plan, "removed padding and imbalance"),
        (split.library, f"only {collective_library(result)} being {library}"),
        (split.plan_rest, "other effects of the plan"),
    )
    listed = ", ".join(f"{_signed(part.ms)} [{_signed(part.quartiles[0])} {_signed(part.quartiles[1])}] ms {name}" for part, name in parts)
    verb = "saves" if ladder.saved.ms >= 0 else "LOSES"
    spread = f"saved in the middle half of the steps: {_signed(ladder.saved.quartiles[0])} to {_signed(ladder.saved.quartiles[1])}"
    return (
        f"From nccl_pad to odc_nopad a step {verb} {_ms(abs(ladder.saved.ms))} ms ({spread}): {listed}. "
        "Waiting and padding are computed from compute times; the other two parts are what is left over of a step, noise included."
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
    left_out += [f"{counted(len(skipped), 'step')} without a target"] if skipped else []
    few = " So few do not tell which arm is faster: take at least ten (--steps, train_iters)." if len(result.steps) < FEW_STEPS else ""
    said.append(f"Measured over {counted(len(result.steps), 'step')}{'; left out: ' if left_out else ''}{' and '.join(left_out)}.{few}")
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


def _signed(ms: float) -> str:
    return ("+" if ms >= 0 else "-") + _ms(abs(ms))


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
