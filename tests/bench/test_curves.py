from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from primus_odc.bench.command import add_bench_arguments
from primus_odc.bench.curves import describe, judge
from primus_odc.cli import main
from primus_odc.errors import ConfigError

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def test_an_arm_is_judged_by_how_far_the_baselines_own_curves_are_apart() -> None:
    curves = {
        "nccl_pad": [[3.0, 2.0, 1.0], [3.0, 2.02, 1.01], [3.0, 1.99, 0.98]],
        "odc_pad": [[3.0, 2.03, 1.0], [3.01, 2.0, 1.0], [3.0, 2.0, 1.03]],
        "odc_nopad": [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.06]],
    }
    pad, nopad = judge(curves)
    assert pad.spread == pytest.approx(0.03) and pad.farthest == pytest.approx(0.02) and pad.within
    assert nopad.farthest == pytest.approx(0.05) and not nopad.within and nopad.final == pytest.approx(3.06 / 3)
    assert "within its spread" in describe(pad) and "OUTSIDE OF" in describe(nopad)


def test_an_arm_that_differs_by_chance_only_is_seldom_called_outside() -> None:
    """Curves that drift apart and back: differences of losses are correlated over about ten steps."""
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    args = parser.parse_args(["curves", "config.yaml", "--out", "c.json"])
    generator = np.random.default_rng(0)
    outside = 0
    for _ in range(300):
        noise = generator.normal(size=(args.assignments + args.of_others, 50))
        for step in range(1, 50):
            noise[:, step] += 0.9 * noise[:, step - 1]
        curves = {"nccl_pad": noise[: args.assignments].tolist(), "odc_nopad": noise[args.assignments :].tolist()}
        outside += not judge(curves)[0].within
        (moved,) = judge({**curves, "odc_nopad": (noise[args.assignments :] + 10 * noise.std()).tolist()})
        assert not moved.within
    assert outside <= 0.03 * 300


@pytest.mark.timeout(150)
def test_curves_of_two_arms_are_written_with_their_verdicts(tmp_path: Path) -> None:
    words = ["--arms", "nccl_pad", "odc_nopad", "--steps", "4", "--assignments", "3", "--nproc", "2", "--out", str(tmp_path / "c.json")]
    code = main(["bench", "curves", str(SMOKE), *words, "--data_cache_path", str(tmp_path / "cache"), "odc.timeout_s=77"])
    (entry,) = json.loads((tmp_path / "c.json").read_text())["runs"][0]["entries"]
    assert entry["config"]["odc"]["timeout_s"] == 77
    losses = entry["losses"]
    assert entry["kind"] == "curves" and [len(curve) for arm in losses.values() for curve in arm] == [4] * 5
    for own, reference in zip(losses["odc_nopad"], losses["nccl_pad"][:2], strict=True):
        assert own == pytest.approx(reference, rel=1e-5)
    (verdict,) = entry["verdicts"]
    assert verdict["arm"] == "odc_nopad" and verdict["within"] == (code == 0)  # so few steps in fp32 may have no spread at all


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*nccl_pad is what.*at least 2.*--of-others 2: at most"):
        main(["bench", "curves", str(SMOKE), "--arms", "odc_pad", "--assignments", "1", "--out", "c.json", "--traceback"])
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*nccl_pad stands there 2 times.*nccl_pad alone leaves nothing to judge"):
        main(["bench", "curves", str(SMOKE), "--arms", "nccl_pad", "nccl_pad", "--out", "c.json", "--traceback"])
