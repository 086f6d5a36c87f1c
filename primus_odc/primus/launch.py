"""Primus' command line with the plugin installed explicitly, where torch's entry points are switched off or not found.

Takes the words of ``primus/cli/main.py`` and may stand wherever that does::

    torchrun --nproc-per-node 8 -m primus_odc.primus.launch train posttrain --config experiment.yaml
    primus-cli direct --script "$(python -m primus_odc.primus.launch --path)" -- train posttrain --config experiment.yaml

With ``PRIMUS_PATH`` set, that checkout is run; else the Primus that Python finds. ``PRIMUS_ODC_PRESETS``, unless it is set, names the
folder of :mod:`primus_odc.primus.presets`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn


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
    from primus_odc.megatron.launcher import leave_unforeseen
    from primus_odc.megatron.local_ranks import end_with_launcher
    from primus_odc.primus.loading import install

    end_with_launcher()
    checkout = os.environ.get("PRIMUS_PATH")
    if checkout:
        if not Path(checkout, "primus", "cli", "main.py").is_file():
            _stop(f"PRIMUS_PATH={checkout} is no checkout of Primus")
        sys.path.insert(0, str(Path(checkout).resolve()))
    elif importlib.util.find_spec("primus") is None:
        _stop("Primus is not installed and PRIMUS_PATH is not set: let it name a checkout of Primus")
    os.environ.setdefault("PRIMUS_ODC_PRESETS", str(Path(__file__).resolve().parent / "presets"))
    install()
    try:
        importlib.import_module("primus.cli.main").main()
    except Exception as error:
        leave_unforeseen(error)
        raise


def _stop(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
