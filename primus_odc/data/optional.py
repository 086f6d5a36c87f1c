"""Import packages that only some sources and tokenizers need."""

from __future__ import annotations

import importlib
from typing import Any

from primus_odc.errors import DataError


def optional_import(module: str, package: str, purpose: str) -> Any:
    """Import ``module``; where it is missing, say which package to install and what for.

    Raises:
        DataError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise DataError(f"{purpose} needs the package {package}: pip install {package}") from error
