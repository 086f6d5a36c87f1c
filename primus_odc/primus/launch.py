"""Primus' command line with the plugin installed explicitly, where torch's entry points are switched off or not found.

Takes the words of ``primus/cli/main.py`` and may stand wherever that does::

    torchrun --nproc-per-node 8 -m primus_odc.primus.launch train posttrain --config experiment.yaml
    primus-cli direct --script "$(python -m primus_odc.primus.launch --path)" -- train posttrain --config experiment.yaml

Primus is imported from where Python finds it, else from ``PRIMUS_PATH``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Run Primus; ``--path`` as the only word prints this file's path.

    Raises:
        SystemExit: Primus' exit status, or 2 where no Primus is found.
    """
    if sys.argv[1:] == ["--path"]:
        print(Path(__file__).resolve())
        return
    # Run as a script, this file's folder comes first on the path, and its modules would be found under short names.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    from primus_odc.primus.loading import install

    if importlib.util.find_spec("primus") is None:
        checkout = os.environ.get("PRIMUS_PATH")
        if not checkout or not Path(checkout, "primus", "cli", "main.py").is_file():
            found = f"PRIMUS_PATH={checkout} is no Primus checkout" if checkout else "PRIMUS_PATH is not set"
            print(f"error: Primus is not installed and {found}: set PRIMUS_PATH to a checkout of Primus", file=sys.stderr)
            raise SystemExit(2)
        sys.path.insert(0, str(Path(checkout).resolve()))
    install()
    importlib.import_module("primus.cli.main").main()


if __name__ == "__main__":
    main()
