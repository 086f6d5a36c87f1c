"""What the process that starts a comparison hands to its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primus_odc.config import BASELINES


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """What the ranks are to do."""

    config: str
    """Path of the experiment YAML."""
    overrides: list[str]
    """Words that change it."""
    arms: list[str]
    """Reporting names."""
    steps: int | None
    """Of every arm; None: ``train_iters``."""
    world_size: int
    """Number of ranks."""
    on_gpus: bool
    """A GPU for each rank; else all on the CPU."""
    store: str
    """File through which the ranks find each other."""
    result: str
    """File that rank 0 writes the result to."""
    command: str
    """The command line, for the report."""
    entry: str = "primus_odc.megatron.compare_rank:compare"
    """``module:function`` that every rank calls with the job and its device."""
    assignments: int = 1
    """Of samples to ranks; for loss curves of nccl_pad."""
    of_others: int = 1
    """Likewise, for those of every other arm."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def arm_params(params: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """``params`` with the communication of another arm."""
    backend = "nccl_pad" if arm in BASELINES else arm
    given = {} if params.get("odc") is None else params["odc"]
    if not isinstance(given, Mapping):
        return {**params, "comm_backend": backend}  # no block: refused where it is read
    odc = {key: value for key, value in given.items() if key != "baseline"}
    if arm in BASELINES:
        odc["baseline"] = BASELINES[arm]
    return {**params, "comm_backend": backend, "odc": odc}
