"""Computing predicted from ideal, on made-up times that follow the model exactly."""

from __future__ import annotations

from typing import Any

import pytest

from primus_odc.megatron.device_rounds import predict_compute, seen_on_device
from primus_odc.megatron.round_records import ArmStep, IdealStep, Round
from primus_odc.report.timeline import Span


def ms(*lengths: int) -> float:
    return 0.02 * sum(lengths) + 1e-5 * sum(n * n for n in lengths) + 3.0


IDEAL = IdealStep(
    ms=0.0,
    loss=1.0,
    lengths=[[[100, 300], [1000]], [[500]], [[800, 20]]],
    microbatch_ms=[[ms(100, 300), ms(1000)], [ms(500)], [ms(800, 20)]],
)


def spans(rank: int, *rows: tuple[Any, int | None, float]) -> list[Span]:
    found, now = [], 0.0
    for kind, microbatch, length in rows:
        found.append(Span(rank=rank, kind=kind, start_ms=now, end_ms=now + length, microbatch=microbatch))
        now += length
    return found


def test_what_a_rank_waited_for_inside_forward_and_backward_is_told_apart() -> None:
    seen = seen_on_device(
        spans(0, ("forward", 0, 9.0), ("backward", 0, 30.0), ("forward", 1, 2.0), ("backward", 1, 2.0), ("settle", None, 5.0))
        + spans(0, ("optimizer", None, 4.0), ("publish", None, 1.0)),
        2,
    )
    assert seen.microbatch_ms == [39.0, 4.0] and seen.communication_ms == 6.0 and seen.wait_ms is None
    outcome: Any = None
    step = ArmStep(ms=60.0, outcome=outcome, ranks=[seen, seen_on_device([], 0)], lengths=[[[700], []], []])
    (found,) = predict_compute([Round(arms={"nccl_pad": step}, ideal=IDEAL)])
    rank, idle = found.arms["nccl_pad"].ranks
    padding = 0.02 + 1e-5 + 3.0  # as a microbatch of one token
    assert rank.microbatch_ms == pytest.approx([ms(700), padding])
    assert rank.busy_ms == pytest.approx(ms(700) + 4.0)  # padding is no work
    assert rank.communication_ms == pytest.approx(6.0 + 43.0 - ms(700) - padding)
    assert (idle.busy_ms, idle.microbatch_ms, idle.communication_ms) == (0.0, [], 0.0)


def test_without_ideal_nothing_is_predicted() -> None:
    step = ArmStep(ms=1.0, outcome=None, ranks=[seen_on_device(spans(0, ("forward", 0, 1.0)), 1)], lengths=[[[5]]])  # type: ignore[arg-type]
    rounds = [Round(arms={"a": step}, ideal=None)]
    assert predict_compute(rounds) == rounds
