"""What the process that starts a benchmark hands to its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primus_odc._arguments import repeated
from primus_odc.bench.shapes import SHAPES
from primus_odc.config import parse_options
from primus_odc.errors import ConfigError
from primus_odc.planning import Policy

STOCK: dict[str, Policy] = {"nccl_pad": "lb_micro", "nccl_localsort": "localsort", "nccl_zero2": "lb_mini"}
ON_DEMAND: dict[str, Policy] = {"odc_pad": "lb_micro", "odc_nopad": "lb_mini"}
IDEAL = "ideal"
LENGTHS = ("longalign-like", "equal")
SHORTEST = 2
"""Tokens of a sample with a target."""
VARIANTS: dict[str, dict[str, str]] = {
    "owner": {"accumulate": "owner"},
    "resident": {"parameters": "resident"},
}
"""``odc_nopad:owner``: options of the engine that differ from ``accumulate: local``, ``parameters: reshard``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmSpec:
    """One row of a benchmark."""

    name: str
    policy: Policy
    options: tuple[tuple[str, str], ...] | None = None
    """Of the engine; None: no engine."""

    @property
    def pads_empty_ranks(self) -> bool:
        """Whether a rank without work runs a padding microbatch, because it has to take part in collectives."""
        return self.name == "nccl_zero2"


def arm_spec(name: str) -> ArmSpec:
    """Read an arm's name: ``nccl_pad``, ``odc_nopad``, ``odc_nopad:resident``, ``odc_nopad:owner+resident``, ``ideal``, ...

    Raises:
        ConfigError: no such arm.
    """
    base, colon, variants = name.partition(":")
    if base == IDEAL and not colon:
        return ArmSpec(name=name, policy="lb_mini")
    if base in STOCK and not colon:
        return ArmSpec(name=name, policy=STOCK[base])
    chosen = variants.split("+") if colon else []
    if base not in ON_DEMAND or any(word not in VARIANTS for word in chosen):
        known = ", ".join([*STOCK, *ON_DEMAND, IDEAL])
        raise ConfigError([f"--arms {name}: known are {known}; on-demand arms also with :{' :'.join(VARIANTS)} or both joined by +"])
    options = {"accumulate": "local", "parameters": "reshard"}
    for word in chosen:
        options |= VARIANTS[word]
    return ArmSpec(name=name, policy=ON_DEMAND[base], options=tuple(sorted(options.items())))


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """A benchmark as every rank reads it. Its fields are those of the command line; ``bytes`` is for primitives, the rest of the middle
    for train."""

    kind: str
    device: str
    world_size: int
    transport: str
    timeout_s: float
    out: str
    commit: str | None
    command: str
    store: str
    ranks_per_node: int | None = None
    interface: str | None = None
    nic: str | None = None
    bytes: Sequence[int] = ()
    repeats: int = 20
    shape: str = "tiny"
    layers: int | None = None
    lengths: str = LENGTHS[0]
    points: Sequence[tuple[int, int]] = ()
    arms: Sequence[str] = ()
    minibatches: int = 8
    sequence: int = 2
    seed: int = 0
    fixed_tokens: float = 128.0
    optimizer: str = "local"
    clip_grad: float = 1.0
    share_model: bool = False
    budget_s: float = 0.0
    deterministic: bool = False
    trace: str | None = None

    def engine_options(self) -> dict[str, Any]:
        """What all engines of the benchmark have in common."""
        return {key: getattr(self, key) for key in ("transport", "timeout_s", "ranks_per_node", "interface", "nic")}

    def check(self) -> None:
        """
        Raises:
            ConfigError: everything that is wrong.
        """
        problems = []
        if self.device not in ("cpu", "cuda"):
            problems.append(f"--device {self.device}: cpu or cuda")
        if self.kind == "train" and self.shape not in SHAPES:
            problems.append(f"--shape {self.shape}: known are {', '.join(SHAPES)}")
        elif self.kind == "train":
            divisor = SHAPES[self.shape].length_divisor
            divided = f" (after --shape {self.shape} divided it by {divisor})" if divisor > 1 else ""
            problems += [
                f"--points, --cap: a cap of {cap}{divided} is too small: a sample needs {SHORTEST} tokens, the second one to be predicted"
                for cap in sorted({cap for _, cap in self.points if cap < SHORTEST})
            ]
        problems += repeated("--arms", self.arms)
        for name in dict.fromkeys(self.arms):
            try:
                arm_spec(name)
            except ConfigError as error:
                problems += error.problems
        if self.optimizer == "graph" and self.device != "cuda":
            problems.append("--optimizer graph: CUDA graphs need --device cuda")
        if self.optimizer == "graph" and self.share_model:
            problems.append("--optimizer graph: gradients move when an engine comes and goes; leave out --share-model or the graph")
        problems += self._problems_of_the_engine()
        if self.lengths not in LENGTHS:
            problems.append(f"--lengths {self.lengths}: {' or '.join(LENGTHS)}")
        if problems:
            raise ConfigError(problems)

    def _problems_of_the_engine(self) -> Sequence[str]:
        try:
            parse_options(self.engine_options())
        except ConfigError as error:
            return error.problems
        return ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        fields = json.loads(path.read_text(encoding="utf-8"))
        # JSON knows lists only.
        fields |= {key: tuple(fields[key]) for key in ("bytes", "arms")}
        return cls(**fields | {"points": tuple((samples, cap) for samples, cap in fields["points"])})
