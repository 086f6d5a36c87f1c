"""What the doctor is asked about."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from primus_odc.doctor.finding import Severity

CPU_PROCESSES = 4
"""Without GPUs `scripts/run_odc.sh` starts at most so many processes."""


@dataclass(kw_only=True, slots=True)
class Job:
    """A run to come, or the machine alone."""

    config: str | None = None
    """The experiment YAML; None: the machine alone is checked."""
    overrides: list[str] = field(default_factory=list)
    """Command-line words that change its keys."""
    ranks: int | None = None
    """All processes of the run; None: found out, see :meth:`world`."""
    nodes: int = 1
    primus_path: str | None = None
    """Checkout of Primus that is to train; None: the standalone trainer."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What earlier stages of the child process found: ``gpus``, ``gpu_free_bytes``, ``no_p2p``, ``stream_words``."""

    @property
    def severity(self) -> Severity:
        """Of what an on-demand run cannot do without. Where a YAML says which arm is meant, the check of that YAML judges."""
        return "problem" if self.config is None else "note"

    def world(self, environment: Mapping[str, str] = os.environ) -> int:
        """All processes of the run: as asked, else WORLD_SIZE, else the GPUs of every node, else as many CPU processes as the launcher
        starts."""
        if self.ranks is not None:
            return self.ranks
        size = environment.get("WORLD_SIZE", "")
        if size.isascii() and size.isdigit():  # a wrong one is a finding of the launch check
            return max(1, int(size))
        return self.nodes * (self.facts.get("gpus") or min(len(os.sched_getaffinity(0)), CPU_PROCESSES))

    def local_world(self) -> int:
        """Processes of this node."""
        return -(-self.world() // self.nodes)
