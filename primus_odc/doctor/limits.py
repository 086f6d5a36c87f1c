"""Checks side by side in threads, each with a time limit of its own.

A thread that is past its limit is left alone: it is a daemon, sits in a system call, and ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from primus_odc.doctor.finding import Finding, Severity


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    """One check: ``run`` has ``limit_s`` seconds to return its findings."""

    name: str
    run: Callable[[], list[Finding]]
    limit_s: float = 5.0
    late: str = "run doctor again with a larger --time-limit"
    """What to do when it did not end in time."""
    late_severity: Severity = "note"


@dataclass(slots=True)
class _Running:
    check: Check
    thread: threading.Thread
    findings: list[Finding] = field(default_factory=list)
    error: BaseException | None = None


def start(checks: Sequence[Check]) -> Callable[[float], list[Finding]]:
    """Start all checks at once.

    Returns:
        A function that waits for them and returns their findings in the order of ``checks``; its argument multiplies every limit. A check
        that is not done gives one finding that says so. It raises what a check raised, which is a defect of the check.
    """
    began = time.monotonic()
    running = [_start(check) for check in checks]

    def wait(scale: float) -> list[Finding]:
        return [finding for one in running for finding in _wait(one, began, one.check.limit_s * scale)]

    return wait


def _start(check: Check) -> _Running:
    def run() -> None:
        try:
            one.findings = check.run()
        except BaseException as error:  # noqa: BLE001  # raised again by _wait
            one.error = error

    one = _Running(check, threading.Thread(target=run, name=f"doctor {check.name}", daemon=True))
    one.thread.start()
    return one


def _wait(one: _Running, began: float, limit_s: float) -> list[Finding]:
    one.thread.join(max(0.0, began + limit_s - time.monotonic()))
    if one.thread.is_alive():
        check = one.check
        return [Finding(check=check.name, severity=check.late_severity, found=f"no answer within {limit_s:g} s", setting=check.late)]
    if one.error is not None:
        raise one.error
    return one.findings
