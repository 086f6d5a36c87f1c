"""The order of the tests' files, and what no test may leave behind for the next one of its process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes is the machine's matter: a time is no assertion.
settings.register_profile("primus_odc", deadline=None)
settings.load_profile("primus_odc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, or the last one would run with every other worker idle.

    How long a file may take is the sum of the time limits its tests ask for beyond the common one, so no list has to be kept.
    """
    limits: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[str(item.path)] += mark.args[0] if mark is not None else 0
    items.sort(key=lambda item: -limits[str(item.path)])


def _levels() -> dict[str, int]:
    loggers = logging.root.manager.loggerDict
    names = ["primus_odc", *(name for name in loggers if name.startswith("primus_odc."))]
    return {name: logging.getLogger(name).level for name in names}


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A command called in the process of the tests sets them, as for a rank that keeps quiet."""
    before = _levels()
    yield
    for name in _levels():
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))
