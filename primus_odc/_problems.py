"""Gathering what several checks find wrong, so that a user is told everything at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from primus_odc.errors import ConfigError, DataError

T = TypeVar("T")

# A problem that names its key begins with it: "lr is missing", "seed: -5 is not ...", "odc.transport has no choice ...".
_KEY = re.compile(r"[\w.-]+(?=:? )")


class Problems:
    """What is wrong so far; of a key that an earlier check has named, later checks add nothing."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """What ``check`` returns; None where it found something wrong, which is kept."""
        try:
            return check()
        except ConfigError as error:
            known = {_key(problem) for problem in self.found}
            self.found += [problem for problem in error.problems if _key(problem) not in known]
        except DataError as error:
            if str(error) not in self.found:
                self.found.append(str(error))
        return None

    def raise_any(self) -> None:
        """End the checks.

        Raises:
            ConfigError: with everything found.
        """
        if self.found:
            raise ConfigError(self.found)


def _key(problem: str) -> str:
    match = _KEY.match(problem)
    # An ordinary word, as in "the warm-up of ...", is no key: such a problem is compared as a whole.
    return match[0] if match and match[0] not in ("a", "an", "the") else problem
