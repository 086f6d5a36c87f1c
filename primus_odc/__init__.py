"""On-Demand Communication for FSDP2: one-sided parameter gathers and gradient pushes, one rendezvous per optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from primus_odc.fsdp.engine import Engine, attach

__all__ = ["Engine", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    # torch is imported on first use of the engine only, so that planning and configuration work without it.
    if name in ("Engine", "attach"):
        from primus_odc.fsdp import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'primus_odc' has no attribute {name!r}")
