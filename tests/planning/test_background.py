"""Plans made ahead: order, depth, failures, time-outs. Events, not clocks, decide who is first."""

from __future__ import annotations

import threading
import traceback

import pytest

from primus_odc.errors import PlanError, ProtocolError
from primus_odc.planning import PlanAhead

WAIT_S = 20.0


def test_plans_are_made_while_the_consumer_works() -> None:
    made = {step: threading.Event() for step in range(3, 12)}

    def make(step: int) -> str:
        made[step].set()
        return f"plan {step}"

    with PlanAhead(make, first_step=3, depth=2, timeout_s=WAIT_S) as plans:
        for step in range(3, 9):
            # The consumer has asked for nothing beyond step - 1, and yet this plan and the one after it get made.
            assert made[step].wait(WAIT_S) and made[step + 1].wait(WAIT_S)
            assert plans.get(step) == f"plan {step}"


def test_a_slow_planner_is_hidden_behind_a_slower_step() -> None:
    """Planning is held up by an event, as a delay would; the consumer's own work lets it go on, and then no ``get`` ever waits."""
    release, finished = threading.Semaphore(0), threading.Semaphore(0)
    consumer = threading.get_ident()
    makers = set()

    def make(step: int) -> int:
        assert release.acquire(timeout=WAIT_S)
        makers.add(threading.get_ident())
        finished.release()
        return step

    with PlanAhead(make, first_step=0, depth=2, timeout_s=WAIT_S) as plans:
        release.release()
        assert finished.acquire(timeout=WAIT_S)
        for step in range(5):
            assert plans.get(step) == step
            # "Training" on the plan of this step: meanwhile the delay of the next plan ends and the plan is made.
            release.release()
            assert finished.acquire(timeout=WAIT_S), "the next plan is made during this step, not in get()"
        release.release(10)
    assert consumer not in makers and len(makers) == 1


def test_no_more_than_depth_plans_ahead() -> None:
    calls = []
    third = threading.Event()

    def make(step: int) -> int:
        calls.append(step)
        if step == 2:
            third.set()
        return step

    with PlanAhead(make, first_step=0, depth=2, timeout_s=WAIT_S) as plans:
        assert not third.wait(0.1) and calls == [0, 1]
        assert plans.get(0) == 0
        assert third.wait(WAIT_S)


def failing(step: int) -> int:
    if step == 2:
        raise PlanError("sample 'a' is too long")
    return step


def test_a_planning_error_is_raised_at_its_step_with_its_traceback() -> None:
    with PlanAhead(failing, first_step=0, timeout_s=WAIT_S) as plans:
        assert [plans.get(0), plans.get(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(PlanError, match="'a' is too long") as caught:
                plans.get(2)
            assert "in failing" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_steps_are_taken_in_order() -> None:
    with PlanAhead(lambda step: step, first_step=5, timeout_s=WAIT_S) as plans:
        with pytest.raises(ProtocolError, match="step 6 asked for, but step 5 is next"):
            plans.get(6)
        assert plans.get(5) == 5


def test_a_plan_that_does_not_come_is_a_time_out() -> None:
    release = threading.Event()
    plans = PlanAhead(lambda step: release.wait(WAIT_S), first_step=0, timeout_s=0.05)
    with pytest.raises(PlanError, match=r"step 0 was not made within 0\.05 s"):
        plans.get(0)
    with pytest.raises(PlanError, match="did not end"):
        plans.close()
    release.set()


def test_close_during_planning() -> None:
    started, release = threading.Event(), threading.Event()
    calls = []

    def make(step: int) -> int:
        calls.append(step)
        started.set()
        assert release.wait(WAIT_S)
        return step

    plans = PlanAhead(make, first_step=0, timeout_s=WAIT_S)
    assert started.wait(WAIT_S)
    raised: list[BaseException] = []

    def waiting() -> None:
        try:
            plans.get(0)
        except ProtocolError as error:
            raised.append(error)

    consumer = threading.Thread(target=waiting)
    consumer.start()
    closer = threading.Thread(target=plans.close)
    closer.start()
    consumer.join(WAIT_S)
    assert not consumer.is_alive() and "close" in str(raised[0]), "a waiting get ends at once, before the plan is made"
    release.set()
    closer.join(WAIT_S)
    assert not closer.is_alive() and calls == [0]
    plans.close()
    with pytest.raises(ProtocolError, match="after close"):
        plans.get(0)


def test_depth_must_be_positive() -> None:
    with pytest.raises(PlanError, match="depth is 0"):
        PlanAhead(lambda step: step, first_step=0, depth=0, timeout_s=WAIT_S)
