"""The order of the tests' files."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, or the last one would run with every other worker idle.

    How long a file may take is the sum of the time limits its tests ask for beyond the common one, so no list has to be kept.
    """
    limits: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[str(item.path)] += mark.args[0] if mark is not None else 0
    items.sort(key=lambda item: -limits[str(item.path)])
