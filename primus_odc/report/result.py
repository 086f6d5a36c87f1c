"""The records of a comparison, and their JSON: ``result.json``.

Whoever runs the arms makes one :class:`ArmResult` per arm with :meth:`ArmResult.measure` and one :class:`ComparisonResult` from them with
:meth:`ComparisonResult.build`; table and page read nothing else.

Every list over steps covers *all* steps, warm-up included, so that loss curves start at the first step. Statistics leave out the first
``warmup_steps`` steps and every step at which a minibatch was skipped for having no target token. The headline number is

    speedup[arm] = median over the measured steps of ms(baseline, step) / ms(arm, step)

a paired ratio: both arms ran the same minibatch at that step. Its quartiles stand beside it in ``spread``. Whatever compares two arms is
made so, step by step and then the median, and never of two medians: those of times alone are ``ms_per_step_median`` and ``ideal_ms``.
``baseline`` is nccl_pad wherever it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from primus_odc.errors import DataError
from primus_odc.report import schema
from primus_odc.report.arm import ArmPhases, ArmResult, measured_steps
from primus_odc.report.ladder import Ladder, Part, differences, split_ladder
from primus_odc.report.stats import median, paired_ratios, quartiles, relative_differences
from primus_odc.report.timeline import Timeline

__all__ = ["BASELINE", "FORMAT", "ArmPhases", "ArmResult", "ComparisonResult", "measured_steps"]

FORMAT = 2
BASELINE = "nccl_pad"


@dataclass(kw_only=True, slots=True, frozen=True)
class ComparisonResult:
    """A whole comparison: ``result.json``."""

    arms: list[ArmResult]
    """In the order of the table."""
    speedup: dict[str, float]
    """Per arm other than the baseline: median paired ratio baseline / arm; above 1 the arm is faster."""
    ideal_ms: float | None
    """Median over the measured steps of ``ideal_ms_per_step``; None where it was not run."""
    machine: dict[str, object]
    """Facts about the machine, see :mod:`primus_odc.report.machine`."""
    format: int = FORMAT
    """Version of this schema."""
    baseline: str = BASELINE
    """The arm all others are compared with."""
    warmup_steps: int = 0
    """Number of first steps left out of every statistic."""
    ideal_ms_per_step: list[float] | None = None
    """[step] the largest rank's forward and backward of the LB-Mini plan without communication, plus the optimizer step."""
    spread: dict[str, list[float]] = field(default_factory=dict)
    """Per arm other than the baseline: ``[q1, q3]`` of the paired ratio."""
    ideal_share: dict[str, float] = field(default_factory=dict)
    """Per arm: median over the measured steps of ``ideal_ms / ms``; 1 is as fast as without any communication."""
    agreement: dict[str, float] = field(default_factory=dict)
    """Per arm other than the baseline: the largest relative loss difference to it over all steps."""
    ladder: Ladder | None = None
    """None unless nccl_pad, odc_pad and odc_nopad all ran."""
    timelines: list[Timeline] = field(default_factory=list)
    """One minibatch per arm, the same one for all."""
    config: dict[str, object] = field(default_factory=dict)
    """What was trained: the keys worth naming in a heading."""
    seed: int | None = None
    """Of model, data order and everything else random."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python and the packages involved."""
    command: str = ""
    """The command that made this."""
    date: str = ""
    """ISO 8601, UTC."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know beside the numbers: one sentence each."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise DataError(f"format {self.format}, this release reads format {FORMAT}")
        check_arms(self.arms, self.ideal_ms_per_step)
        names = [arm.arm for arm in self.arms]
        if self.baseline not in names:
            raise DataError(f"the baseline {self.baseline!r} is not among the arms {names}")
        others = set(names) - {self.baseline}
        for key, statistic in (("speedup", self.speedup), ("spread", self.spread), ("agreement", self.agreement)):
            if set(statistic) != others:
                raise DataError(f"{key} must have exactly the arms {sorted(others)}, it has {sorted(statistic)}")
        if not set(self.ideal_share) <= set(names):
            raise DataError(f"ideal_share has {sorted(self.ideal_share)}, the arms are {names}")
        if any(len(pair) != 2 for pair in self.spread.values()):
            raise DataError("spread: every arm needs [q1, q3]")

    def __getitem__(self, arm: str) -> ArmResult:
        return next(item for item in self.arms if item.arm == arm)

    def __contains__(self, arm: str) -> bool:
        return any(item.arm == arm for item in self.arms)

    @property
    def steps(self) -> list[int]:
        """The measured steps."""
        return measured_steps(len(self.arms[0].ms_per_step), self.warmup_steps, self.arms[0].skipped_steps)

    @classmethod
    def build(
        cls,
        *,
        arms: Sequence[ArmResult],
        warmup_steps: int,
        machine: dict[str, object],
        ideal_ms_per_step: Sequence[float] | None = None,
        timelines: Sequence[Timeline] = (),
        config: dict[str, object] | None = None,
        seed: int | None = None,
        versions: dict[str, str] | None = None,
        command: str = "",
        date: str = "",
        notes: Sequence[str] = (),
    ) -> ComparisonResult:
        """The comparison of finished arms: speed-ups, agreement and ladder worked out. The first arm is the baseline where nccl_pad did
        not run."""
        check_arms(arms, ideal_ms_per_step)
        base = next((arm for arm in arms if arm.arm == BASELINE), arms[0])
        others = [arm for arm in arms if arm is not base]
        steps = measured_steps(len(base.ms_per_step), warmup_steps, base.skipped_steps)
        ratios = {arm.arm: paired_ratios(base.ms_per_step, arm.ms_per_step, steps) for arm in others}
        ideal_ms = ideal_share = None
        if ideal_ms_per_step is not None:
            ideal_ms = median([ideal_ms_per_step[step] for step in steps])
            ideal_share = {arm.arm: median(paired_ratios(ideal_ms_per_step, arm.ms_per_step, steps)) for arm in arms}
        return cls(
            arms=list(arms),
            speedup={arm: median(values) for arm, values in ratios.items()},
            ideal_ms=ideal_ms,
            machine=machine,
            baseline=base.arm,
            warmup_steps=warmup_steps,
            ideal_ms_per_step=None if ideal_ms_per_step is None else list(ideal_ms_per_step),
            spread={arm: quartiles(values) for arm, values in ratios.items()},
            ideal_share=ideal_share or {},
            agreement={
                arm.arm: max((d for d in relative_differences(arm.loss, base.loss) if d is not None), default=0.0) for arm in others
            },
            ladder=build_ladder({arm.arm: arm for arm in arms}, steps, ideal_ms_per_step),
            timelines=list(timelines),
            config=config or {},
            seed=seed,
            versions=versions or {},
            command=command,
            date=date,
            notes=list(notes),
        )

    def write(self, path: Path) -> None:
        """Writes ``result.json``."""
        value = schema.encode(self)
        value.setdefault("ideal_ms", None)
        schema.write_json(path, value)

    @classmethod
    def read(cls, path: Path) -> ComparisonResult:
        """Reads and validates ``result.json``.

        Raises:
            DataError: not such a file; the message names the file and the path inside it.
        """
        value = schema.read_json(path)
        try:
            return schema.decode(cls, value)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def check_arms(arms: Sequence[ArmResult], ideal_ms_per_step: Sequence[float] | None) -> None:
    """Refuses arms that are not runs of the same minibatches.

    Raises:
        DataError: names are not unique, or numbers of steps or ranks or the skipped steps differ.
    """
    names = [arm.arm for arm in arms]
    if not names or len(set(names)) != len(names):
        raise DataError(f"arms must be at least one and unique, got {names}")
    first = arms[0]
    steps = len(first.ms_per_step)
    for arm in arms[1:]:
        if len(arm.ms_per_step) != steps:
            raise DataError(f"{arm.arm} has {len(arm.ms_per_step)} steps, {first.arm} has {steps}")
        if arm.world_size != first.world_size:
            raise DataError(f"{arm.arm} has {arm.world_size} ranks, {first.arm} has {first.world_size}")
        if arm.skipped_steps != first.skipped_steps:
            raise DataError(f"{arm.arm} skipped steps {arm.skipped_steps}, {first.arm} skipped {first.skipped_steps}: not the same data")
    if ideal_ms_per_step is not None and len(ideal_ms_per_step) != steps:
        raise DataError(f"ideal_ms_per_step has {len(ideal_ms_per_step)} steps, the arms have {steps}")


def build_ladder(arms: dict[str, ArmResult], steps: Sequence[int], ideal_ms_per_step: Sequence[float] | None) -> Ladder | None:
    """The ladder over the measured steps; None unless its three arms ran, without a split where compute times are missing."""
    rungs = ("nccl_pad", "odc_pad", "odc_nopad")
    if any(name not in arms for name in rungs):
        return None
    step_ms: dict[str, Sequence[float]] = {name: [arms[name].ms_per_step[step] for step in steps] for name in rungs}
    split = None
    padded_source = next((name for name in ("odc_pad", "nccl_pad") if arms[name].microbatch_ms is not None), None)
    balanced = arms["odc_nopad"].microbatch_ms
    padded = None if padded_source is None else arms[padded_source].microbatch_ms
    if padded is not None and balanced is not None and padded_source is not None:
        optimizer_ms: dict[str, Sequence[float]] = {}
        for name in rungs:
            phases = arms[name].phases
            if phases is not None and phases.optimizer_ms is not None:
                optimizer_ms[name] = [max(phases.optimizer_ms[step]) for step in steps]
        split = split_ladder(
            step_ms=step_ms,
            padded=[padded[step] for step in steps],
            balanced=[balanced[step] for step in steps],
            optimizer_ms=optimizer_ms,
            padded_source=padded_source,
        )
    ideal = None if ideal_ms_per_step is None else [ideal_ms_per_step[step] for step in steps]
    return Ladder(
        nccl_pad_ms=arms["nccl_pad"].ms_per_step_median,
        odc_pad_ms=arms["odc_pad"].ms_per_step_median,
        odc_nopad_ms=arms["odc_nopad"].ms_per_step_median,
        communication=Part.of(differences(step_ms["nccl_pad"], step_ms["odc_pad"])),
        plan=Part.of(differences(step_ms["odc_pad"], step_ms["odc_nopad"])),
        saved=Part.of(differences(step_ms["nccl_pad"], step_ms["odc_nopad"])),
        ideal_ms=None if ideal is None else median(ideal),
        remaining=None if ideal is None else Part.of(differences(step_ms["odc_nopad"], ideal)),
        split=split,
    )
