"""Sample lengths to plan with: named synthetic distributions, and files.

The distributions are lognormals truncated by drawing again, shaped after public data sets: ``longalign-like`` (mean 16.3k tokens, p50
14.0k, p90 28.8k, p99 49.7k) and ``swesmith-like`` (mean 33.5k, p50 27.7k, p90 63.3k, p99 110k). They are synthetic. ``longalign-like/64``
divides every length by 64, for machines without an accelerator.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from primus_odc._config_values import likely
from primus_odc.errors import PlanError
from primus_odc.planning.cost import LONGEST

_SHOWN = 80  # characters of a wrong entry in a message
_WHOLE_ESCAPES = re.compile(r"((?:\\u[0-9a-f]{4}|\\[^u]|[^\\])*).*")
"""JSON without line breaks: group 1 ends before an escape that is cut off."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LengthDistribution:
    """A truncated lognormal distribution of tokens per sample."""

    median: float
    """exp(mu): the median before truncation."""

    sigma: float
    """Standard deviation of the logarithm."""

    shortest: int
    """No sample is shorter."""

    longest: int
    """No sample is longer."""

    divisor: int = 1
    """Lengths are divided by this, rounding down, and are at least 1."""

    def sample(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """Draw ``count`` lengths, int64 [count]; the same seed gives the same lengths."""
        generator = np.random.default_rng(seed)
        kept = np.empty(0)
        while len(kept) < count:
            drawn = np.exp(math.log(self.median) + self.sigma * generator.standard_normal(max(count, 16)))
            kept = np.concatenate([kept, drawn[(drawn >= self.shortest) & (drawn <= self.longest)]])
        return np.maximum(kept[:count].astype(np.int64) // self.divisor, 1)


DISTRIBUTIONS = {
    "longalign-like": LengthDistribution(median=14000, sigma=0.57, shortest=1000, longest=65536),
    "swesmith-like": LengthDistribution(median=27900, sigma=0.66, shortest=1800, longest=131072),
}


def named_distribution(name: str) -> LengthDistribution | None:
    """The distribution called ``name``, optionally followed by ``/divisor``; ``None`` for any other name.

    Raises:
        PlanError: the divisor is above the longest sample.
    """
    base, _, divisor = name.partition("/")
    known = DISTRIBUTIONS.get(base)
    if known is None or (divisor and not divisor.isdecimal()) or divisor == "0":
        return None
    if divisor and int(divisor) > known.longest:
        raise PlanError(f"{name}: the longest sample of {base} has {known.longest} tokens, and no divisor can be above that")
    return LengthDistribution(
        median=known.median, sigma=known.sigma, shortest=known.shortest, longest=known.longest, divisor=int(divisor or 1)
    )


def read_lengths(path: str | Path) -> npt.NDArray[np.int64]:
    """Read tokens per sample from a file, int64 [n].

    ``.json`` holds one list, ``.jsonl`` one value a line, and a value is a number or an object with a number under ``length``. Any other
    file holds numbers separated by white space.

    Raises:
        PlanError: the file cannot be read or holds anything but positive whole numbers; the first bad entry is named.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        elif path.suffix == ".jsonl":
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            values = [_number(word, number) for number, line in enumerate(text.splitlines(), start=1) for word in line.split()]
    except OSError as error:
        names = " or ".join(DISTRIBUTIONS)
        meant = likely(str(path).partition("/")[0], list(DISTRIBUTIONS))
        hint = f"; did you mean {meant}?" if meant else ""
        raise PlanError(f"cannot read lengths from {path}: {error.strerror}. Give a file, or {names}, optionally with /64{hint}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not a file of sample lengths: {error}") from error
    if not isinstance(values, list) or not values:
        raise PlanError(f"{path} holds no list of sample lengths")
    return np.array([_length(value, f"entry {i} of {path}") for i, value in enumerate(values, start=1)], dtype=np.int64)


def _number(word: str, line: int) -> int:
    if not word.isdecimal():
        raise ValueError(f"line {line} has {word[:40]!r}, which is no number of tokens")
    return int(word)


def _length(value: Any, where: str) -> int:
    length = value.get("length") if isinstance(value, dict) else value
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
        raise PlanError(f"{where} is {_shown(value)}; a sample length is a whole number of tokens, from 1 to {LONGEST}, counted beforehand")
    return length


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, not cut inside an escape such as ``\\u6f22``."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else _WHOLE_ESCAPES.sub(r"\1...", text[:_SHOWN], count=1)
