"""The step log of a training run, ``<run>/steps.jsonl``, and the comparison of two of them.

First line: a :class:`LogHeader`, saying what was trained. Every further line: a :class:`StepRecord`, one per optimizer step in order.
Each line is a JSON object written and flushed at once, so a killed run leaves at most one torn last line, which the reader leaves out and
reports. A resumed run continues its own log, in the arm of that log: steps from the resumed one on are cut off first, because the run
repeats them. In another folder it begins a log with the step that it goes on at. A log is a run's own where the run loads checkpoints from
the folder that the log's run saves them in, or where it is the same configuration started again and the log has not reached its end.

Two runs are comparable when they trained on the same minibatches: same data, seed, global batch size and number of ranks, the same steps,
and at every common step the same number of tokens. Anything else is refused, every difference by name. Other differences (a learning
rate, a machine) are allowed and noted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from primus_odc._locks import lock_open_file
from primus_odc.errors import DataError
from primus_odc.report import schema
from primus_odc.report.log_header import MAX_NAMED, LogHeader, differences, foreign, header_problems
from primus_odc.report.machine import utc_now
from primus_odc.report.result import FORMAT, ArmResult, ComparisonResult

FILE_NAME = "steps.jsonl"
WARMUP_STEPS = 2
_OTHER_FOLDER = "choose another folder with PRIMUS_EXP_NAME or --exp_name"
T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRecord:
    """One optimizer step, as rank 0 saw all ranks."""

    step: int
    """0 is the first step of the run."""
    loss: float | None
    """Global loss; None when skipped."""
    grad_norm: float | None
    """Global gradient norm before clipping; None when skipped."""
    ms: float
    """Wall time of the step."""
    tokens: int
    """Tokens of the minibatch over all ranks, padding not counted."""
    microbatches: list[int]
    """[rank]"""
    waited_s: list[float]
    """[rank] seconds without computing: waits and exposed transfers."""
    skipped: bool = False
    """The minibatch had no target token; weights, moments and schedule were left alone."""
    learning_rate: float | None = None
    """Used in this step."""
    collectives: int | None = None
    """On rank 0, FSDP2's included; None where they were not counted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepLog:
    """A log that was read."""

    header: LogHeader
    steps: list[StepRecord]
    torn: bool = False
    """The last line was cut off in writing and left out."""


class StepLogWriter:
    """Writes a run's log; use it on rank 0 only, as a context manager or with :meth:`close`.

    Attributes:
        dropped: steps of a continued log that are cut off because the run repeats them.
    """

    def __init__(self, run: Path, header: LogHeader, first_step: int = 0, *, resumed: bool = False) -> None:
        """Starts ``run/steps.jsonl``; a run that was ``resumed`` continues it behind step ``first_step - 1``, or starts it there.

        The log is locked as long as it is open, so that two runs cannot write one.

        Raises:
            DataError: there is a log and the run is not ``resumed``, the log lacks steps, is another run's or of another arm, or belongs to
                a run that is not comparable, another process is writing it, or the folder cannot be written.
        """
        assert resumed or first_step == 0
        self.dropped = 0
        self._path = log_path(run)
        self._next_step = first_step
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Held until the new log, locked itself, is in its place.
            with self._path.open("ab") as present:
                _lock(present, self._path)
                # What another run put in place since the file was opened is not what is locked now.
                if not os.path.samestat(os.fstat(present.fileno()), self._path.stat()):
                    raise DataError(_running(self._path))
                earlier = _holds_steps(self._path)
                if earlier and not resumed:
                    raise DataError(_taken(self._path))
                header, kept = self._continue(header, first_step) if earlier else (replace(header, first_step=first_step), [])
                partial = self._path.with_name(self._path.name + ".partial")
                self._file = partial.open("w", encoding="utf-8")
                _lock(self._file, self._path)
                self._file.write(_line(header) + "".join(_line(record) for record in kept))
                self._file.flush()
                os.replace(partial, self._path)
        except OSError as error:
            raise DataError(f"{self._path} cannot be written: {error.strerror}; choose another workspace or exp_name") from error

    def _continue(self, header: LogHeader, first_step: int) -> tuple[LogHeader, list[StepRecord]]:
        """(header, steps kept) of the log that is there."""
        old = read_step_log(self._path)
        start = old.header.first_step
        if not old.steps:
            return replace(header, first_step=first_step), []
        problems = foreign(old.header, start + len(old.steps), header.arm, header.config, first_step)
        problems += header_problems(old.header, header, "the log", "this run")
        kept = [record for record in old.steps if record.step < first_step]
        if not problems and start + len(kept) != first_step:
            problems.append(f"the log has steps {start} to {start + len(old.steps) - 1}, and this run goes on at step {first_step}")
        if problems:
            raise DataError(_refusal(self._path, problems))
        self.dropped = len(old.steps) - len(kept)
        return replace(header, first_step=start), kept

    def write(self, record: StepRecord) -> None:
        """Appends one step and flushes it."""
        assert record.step == self._next_step, f"step {record.step} logged, step {self._next_step} is next"
        self._file.write(_line(record))
        self._file.flush()
        self._next_step += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> StepLogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def require_no_log(run: Path) -> None:
    """Whether a run can start in the folder; the log of one that ended before its first step is no obstacle.

    Raises:
        DataError: the folder holds a run's log.
    """
    path = log_path(run)
    if path.exists():
        if _holds_steps(path):
            raise DataError(_taken(path))
        _require_idle(path)


def require_own_log(run: Path, arm: str, config: dict[str, object], first_step: int) -> None:
    """Whether a run that has ``load`` can go on in the folder, as far as its configuration says.

    Raises:
        DataError: the folder holds a log that such a run does not continue.
    """
    path = log_path(run)
    if path.exists() and _holds_steps(path):
        _require_idle(path)
        log = read_step_log(path)
        if problems := foreign(log.header, log.header.first_step + len(log.steps), arm, config, first_step):
            raise DataError(_refusal(path, problems))


def _require_idle(path: Path) -> None:
    # Shared, because all ranks of a run ask at the same time.
    with path.open("rb") as file:
        _lock(file, path, shared=True)


def _refusal(path: Path, problems: Sequence[str]) -> str:
    return f"{path}: cannot be continued: {'; '.join(problems)}; {_OTHER_FOLDER}"


def _holds_steps(path: Path) -> bool:
    with path.open("rb") as file:
        file.readline()
        return file.read(1) != b""


def _taken(path: Path) -> str:
    return f"{path} is the log of another run, finished or running; {_OTHER_FOLDER}, continue it (load), or move it away"


def _running(path: Path) -> str:
    return f"{path} is being written by a run that is still going on; {_OTHER_FOLDER}, or wait for its end"


def _lock(file: IO[Any], path: Path, *, shared: bool = False) -> None:
    lock_open_file(file, str(path), busy=_running(path), remedy="put the workspace on a file system that knows locks", shared=shared)


def log_path(run: Path) -> Path:
    """The log of a run folder; a path that ends in .jsonl is the log itself."""
    return run if run.suffix == ".jsonl" else run / FILE_NAME


def read_step_log(run: Path) -> StepLog:
    """Reads and validates a log.

    Args:
        run: the run folder or its steps.jsonl.

    Raises:
        DataError: no such log, or a line of it is not what it should be; the message names file and line.
    """
    path = log_path(run)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the folder of a finished run of `primus-odc train`, or its {FILE_NAME}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    lines = text.split("\n")
    torn = lines.pop() != ""
    if not lines:
        raise DataError(f"{path}: no header line")
    header = _parse(lines[0], LogHeader, f"{path}:1")
    if header.format != FORMAT:
        raise DataError(f"{path}:1: format {header.format}, this release reads format {FORMAT}")
    steps = [_parse(line, StepRecord, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2)]
    for index, record in enumerate(steps):
        if record.step != header.first_step + index:
            raise DataError(f"{path}:{index + 2}: step {record.step}, expected step {header.first_step + index}")
        for name, values in (("microbatches", record.microbatches), ("waited_s", record.waited_s)):
            if len(values) != header.world_size:
                raise DataError(f"{path}:{index + 2}: {name} has {len(values)} ranks, the header says {header.world_size}")
    return StepLog(header=header, steps=steps, torn=torn)


def compare_logs(run_a: Path, run_b: Path, command: str = "") -> ComparisonResult:
    """The comparison of two finished runs over their common steps; the first is the baseline unless only the second is nccl_pad.

    Raises:
        DataError: the runs are not comparable; every reason is named.
    """
    log_a, log_b = read_step_log(run_a), read_step_log(run_b)
    problems = header_problems(log_a.header, log_b.header, "A", "B")
    start = max(log.header.first_step for log in (log_a, log_b))
    stop = min(log.header.first_step + len(log.steps) for log in (log_a, log_b))
    steps_a, steps_b = ([record for record in log.steps if start <= record.step < stop] for log in (log_a, log_b))
    if (common := len(steps_a)) <= WARMUP_STEPS:
        problems.append(f"only {common} common steps; the first {WARMUP_STEPS} are warm-up, so at least {WARMUP_STEPS + 1} are needed")
    if not problems:
        for a, b in zip(steps_a, steps_b, strict=True):
            if (a.tokens, a.skipped) != (b.tokens, b.skipped):
                problems.append(f"step {a.step}: {_tokens(a)} in A, {_tokens(b)} in B, so they saw different minibatches from there on")
                break
    if problems:
        raise DataError("the two runs cannot be compared:\n" + "\n".join(f"  - {problem}" for problem in problems))
    arms = [_arm(log_a.header.arm, steps_a), _arm(log_b.header.arm, steps_b)]
    if arms[0].arm == arms[1].arm:
        arms = [replace(arm, arm=f"{arm.arm} ({letter})") for arm, letter in zip(arms, "AB", strict=True)]
    header = log_a.header
    return ComparisonResult.build(
        arms=arms,
        warmup_steps=WARMUP_STEPS,
        machine=header.machine,
        config={**header.config, "global_batch_size": header.global_batch_size, "data": header.data},
        seed=header.seed,
        versions=header.versions,
        command=command,
        date=utc_now(),
        notes=_notes(log_a, log_b, start, stop),
    )


def _arm(name: str, steps: Sequence[StepRecord]) -> ArmResult:
    return ArmResult.measure(
        arm=name,
        ms_per_step=[record.ms for record in steps],
        loss=[record.loss for record in steps],
        grad_norm=[record.grad_norm for record in steps],
        tokens=[record.tokens for record in steps],
        microbatches=[record.microbatches for record in steps],
        busy_ms=[[record.ms - 1e3 * waited for waited in record.waited_s] for record in steps],
        warmup_steps=WARMUP_STEPS,
        skipped_steps=[number for number, record in enumerate(steps) if record.skipped],
    )


def _notes(a: StepLog, b: StepLog, start: int, stop: int) -> list[str]:
    notes = [
        "Made from the logs of two finished runs: they did not run in alternation, so the machine may have been busier in one of them."
    ]
    # The arm is what is being compared; its own keys differ by intent.
    config_a, config_b = ({k: v for k, v in log.header.config.items() if k not in ("comm_backend", "odc")} for log in (a, b))
    for title, left, right in (
        ("Configuration", config_a, config_b),
        ("Machine", a.header.machine, b.header.machine),
        ("Versions", a.header.versions, b.header.versions),
    ):
        different = differences(dict(left), dict(right), "A", "B")
        if different:
            more = f"; and {len(different) - MAX_NAMED} more" if len(different) > MAX_NAMED else ""
            notes.append(f"{title} differs: {'; '.join(different[:MAX_NAMED])}{more}.")
    if start > 0:
        notes.append(f"Compared are steps {start} to {stop - 1}, numbered from 0 here: a run that goes on from a checkpoint begins later.")
    elif len(a.steps) != len(b.steps):
        notes.append(f"A has {len(a.steps)} steps and B {len(b.steps)}; the first {stop} are compared.")
    notes += [f"The last line of {name} was cut off in writing and is left out." for name, log in (("A", a), ("B", b)) if log.torn]
    return notes


def _tokens(record: StepRecord) -> str:
    return f"{record.tokens} tokens" + (" (skipped)" if record.skipped else "")


def _line(record: LogHeader | StepRecord) -> str:
    value = schema.encode(record)
    if isinstance(record, StepRecord):
        value = {**value, "loss": record.loss, "grad_norm": record.grad_norm}
    try:
        return json.dumps(value, allow_nan=False) + "\n"
    except ValueError:
        raise DataError(f"step log: a number is not finite and cannot be logged: {value}") from None


def _parse(line: str, kind: type[T], where: str) -> T:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    try:
        return schema.decode(kind, value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
