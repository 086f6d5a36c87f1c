"""T33: a tiny GPT, LongAlign-like lengths, every arm: one loss curve, the stored one; every arm timed.

Right: loss and gradient norm of every arm at every step equal the golden ones, which one process computed in fp64, to 1e-5 relative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from primus_odc.megatron.collector import collecting_between_steps
from primus_odc.megatron.compare_result import arm_result, check_ideal
from primus_odc.megatron.ideal import Ideal
from primus_odc.megatron.rounds import MinibatchMaker, Round, Rounds
from primus_odc.report.timeline import Timeline
from tests.golden.longalign_gpt import MAX_TOKENS, Golden, make_samples
from tests.megatron.arm_cases import ARMS, LINEAR, PARAMS, make_arm
from tests.megatron.gpt_cases import CPU, VOCAB
from tests.workers import run_workers

TOLERANCE = 1e-5


def _train(rank: int, world_size: int, golden: Golden) -> tuple[list[Round], list[Timeline]]:
    dataset: Any = [sample for step, lengths in enumerate(golden.lengths) for sample in make_samples(lengths, step)]
    arms = [make_arm(name) for name in ARMS]
    ideal = Ideal(arms[-1], PARAMS, VOCAB, CPU)
    maker = MinibatchMaker(dataset=dataset, cost_model=LINEAR, max_tokens=MAX_TOKENS, device=CPU)
    samples = np.split(np.arange(len(dataset)), np.cumsum([len(lengths) for lengths in golden.lengths])[:-1])
    with collecting_between_steps() as collect:
        running = Rounds(arms, ideal, maker, collect)
        rounds = [running.run(step, indices) for step, indices in enumerate(samples)]
        timelines = running.timelines(0, samples[0])
    for arm in arms:
        arm.close()
    return rounds, timelines


@pytest.mark.timeout(120)
def test_every_arm_has_the_golden_losses() -> None:
    golden = Golden.read()
    (rounds, timelines), other = run_workers(_train, 2, golden, timeout_s=110)
    assert [r.arms["odc_nopad"].outcome.loss for r in rounds] == [r.arms["odc_nopad"].outcome.loss for r in other[0]]
    for name in ARMS:
        outcomes = [r.arms[name].outcome for r in rounds]
        assert [outcome.loss for outcome in outcomes] == pytest.approx(golden.loss, rel=TOLERANCE), name
        assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(golden.grad_norm, rel=TOLERANCE), name
        assert [outcome.tokens for outcome in outcomes] == [sum(lengths) for lengths in golden.lengths]
    assert golden.loss[-1] < 0.7 * golden.loss[0]
    assert check_ideal(rounds, "odc_nopad") <= 1e-6

    counts = {name: [r.arms[name].outcome.counts for r in rounds] for name in ARMS}
    assert counts["odc_pad"] == counts["nccl_pad"]
    assert counts["nccl_localsort"] == [(3, 3)] * len(rounds)
    assert any(len(set(row)) > 1 for row in counts["odc_nopad"])

    assert [timeline.arm for timeline in timelines] == list(ARMS)
    for name in ARMS:
        result = arm_result(name, [r.arms[name] for r in rounds])
        assert min(result.ms_per_step) > 0 and result.ms_per_step_median > 0 and result.tokens_per_s > 0
        assert all(0 < share < 1 for share in result.idle_fraction)
        assert [[len(row) for row in step] for step in result.microbatch_ms or []] == [list(row) for row in counts[name]]
    ideal_ms = [r.ideal.ms for r in rounds if r.ideal is not None]
    assert len(ideal_ms) == len(rounds) and min(ideal_ms) > 0
