"""The prediction across nodes: step times worked out by hand, and what must hold whatever the rates are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_odc.cli import main
from primus_odc.planning.across import PUBLISHED_14B, SHAPES, DenseShape, Layout, Machine, predict_dual_node

# Two units of 64 parameters (embedding and head) and no layer: a shard of 16 on four ranks.
SMALL = DenseShape(layers=0, hidden=8, ffn=8, heads=2, key_value_heads=2, vocabulary=8)
# One byte a second over a NIC, two inside a node.
SLOW = Machine(tflops=1e-12, nic_gbytes=1e-9, link_gbytes=2e-9)


def test_parameters_of_the_published_shapes() -> None:
    assert sum(SHAPES["14B"].units()) == pytest.approx(14.8e9, rel=0.01)
    assert sum(SHAPES["1.5B"].units()) == pytest.approx(1.78e9, rel=0.01)
    assert SMALL.units() == [64, 64]


def test_a_step_by_hand() -> None:
    layout = Layout(SMALL, 2, 2, SLOW)
    # A node's NICs take 2 bytes a second. Ring: three shards of 2 x 32 bytes in 96 s, gradients as long. Microbatch of 400 s: forward
    # max(100, 96), backward max(300, 192); of 40 s: max(10, 96) + max(30, 192); half a gather and half a reduction are exposed.
    step = layout.step_of_collectives([[400.0, 40.0], [1.0, 1.0]])
    assert (step.computing, step.total) == (440, 400 + 96 + 192 + 96)
    # Ours: two landings of 64 bytes in 64 s, 2 x 2 x 64 bytes of partials in 128 s; in the node a gather reads 3 x 64 bytes in 96 s, a
    # reduction 2 x 128 in 128 s. First forward max(100, 96, 64) + 300, second max(10, 96) + max(30, 96); of the settle's 256 s the last
    # backward hides half of 30; half the landing is exposed.
    step = layout.step_of_ours([[400.0, 40.0], [1.0], [], [400.0]])
    assert (step.computing, step.total) == (440, 400 + 192 + 32 + 256 - 15)
    # All hidden but the last unit: a backward of 7,500 s.
    assert layout.step_of_ours([[10000.0]] * 4).total == 10000 + 32 + 128
    # The port: every rank reads all four shards twice, 4 x 64 bytes over its NIC each time, and 4 x 64 bytes of gradients.
    step = layout.step_of_port([[400.0, 40.0], [1.0]], 1e-9)
    assert step.total == 440 + 2 * 2 * 256 + 256


@pytest.mark.parametrize("machine", [Machine(), Machine(nic_gbytes=10.0), Machine(tflops=1000.0)])
def test_ours_stays_between_collectives_and_what_the_plans_allow(machine: Machine) -> None:
    found = predict_dual_node(machine, minibatches=4)
    assert [p.published for p in found.points] == list(PUBLISHED_14B.values())
    for point in found.points:
        assert 0.98 < point.ours <= point.possible + 1e-3
        assert point.port < point.ours
    slower = predict_dual_node(replace(machine, nic_gbytes=0.1, link_gbytes=1.0), minibatches=4)
    assert all(s.ours != p.ours for s, p in zip(slower.points, found.points, strict=True))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", "--nodes", "2", "--json", "--shape", "1.5B"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in rows] == ["odc, two levels", "ring, nccl_pad", "ring, nccl_zero2", "published port"]
    # Half of 1.78 B parameters enters each node once, and half of their gradients leaves it.
    assert rows[0]["out_parameters"] == pytest.approx(1.78e9, rel=0.01)
    assert rows[0]["out_gradients"] == pytest.approx(2 * 1.78e9, rel=0.01)
    page = (Path(__file__).parents[2] / "docs" / "across-nodes.md").read_text()
    assert main(["traffic"]) == 0
    assert (table := capsys.readouterr().out.strip()) in page and table.count("| 64 |") == 4
    assert main(["traffic", "--published"]) == 0
    assert (prediction := capsys.readouterr().out.strip()) in page and "PREDICTION" in prediction
    assert main(["traffic", "--nodes", "1"]) == 2
    assert "nothing crosses" in capsys.readouterr().err
    assert main(["traffic", "--nic-gbytes", "0"]) == 2
    assert "--nic-gbytes is 0.0" in capsys.readouterr().err
