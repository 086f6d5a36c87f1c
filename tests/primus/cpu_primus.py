"""For tests only: Primus' command line on the CPU; what torchrun starts.

The plugin comes in as it does for a user, by torch's entry point; or LAUNCHER names the module whose main() is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Primus has a package `tests` too, so the shim is imported by its own name.
sys.path[:] = [os.environ["PRIMUS_PATH"], *(entry for entry in sys.path if Path(entry) != HERE), str(HERE)]


def install_shim() -> None:
    try:
        importlib.import_module("cpu_shim").install()
    except Exception as error:  # Primus would go on
        raise SystemExit(f"the shim failed: {error!r}") from error


if __name__ == "__main__":
    registry = importlib.import_module("primus.core.backend.backend_registry").BackendRegistry
    registry.register_setup_hook("megatron", install_shim)
    importlib.import_module(os.environ.get("LAUNCHER", "primus.cli.main")).main()
