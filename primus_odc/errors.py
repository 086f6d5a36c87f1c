"""Every error a user of primus_odc can meet.

All derive from :class:`OdcError`. A message says what happened, on which rank, about which key or parameter group, and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence

from primus_odc._words import counted


class OdcError(RuntimeError):
    """Base of every error primus_odc raises on purpose."""


class ConfigError(OdcError, ValueError):
    """One or more wrong configuration values; ``problems`` holds one sentence for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(f"{counted(len(self.problems), 'problem')} in the configuration:\n" + "\n".join(f"  - {p}" for p in self.problems))


class VersionError(OdcError):
    """A dependency is missing or outside the range this release was tested with."""


class PlanError(OdcError, ValueError):
    """A minibatch cannot be planned (a sample over the cap, no sample at all, ...)."""


class DataError(OdcError, ValueError):
    """A dataset, tokenizer or cache cannot be used."""


class UnsupportedModelError(OdcError, ValueError):
    """The model, or the way it was sharded, cannot be driven on demand."""


class ProtocolError(OdcError):
    """The engine was called in an order its protocol does not allow."""


class VerificationError(OdcError):
    """Transferred data differ from what their owner published."""


class PeerError(OdcError):
    """Another rank died, left or aborted; the message names it."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another rank did not reach the awaited point in time; the message names it."""
