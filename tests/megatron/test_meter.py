from __future__ import annotations

import time

import pytest
import torch

from primus_odc.megatron.meter import Meter


def test_of_nested_exposed_spans_the_outermost_counts() -> None:
    meter = Meter()
    with meter.span("settle"):
        with meter.span("communication"):
            time.sleep(0.02)
        time.sleep(0.02)
    with meter.span("forward", 0):
        time.sleep(0.02)
        with meter.span("communication"):
            time.sleep(0.02)
    assert meter.exposed_s >= 0.06
    counted = meter.exposed_s
    with meter.span("optimizer"):
        time.sleep(0.02)
    assert meter.exposed_s == counted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_device_is_timed_in_settle_and_publish_only() -> None:
    meter = Meter(torch.device("cuda"))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    with meter.span("communication"):
        torch.cuda._sleep(50_000_000)
    begin.record()
    with meter.span("settle"):
        torch.cuda._sleep(50_000_000)
    end.record()
    exposed = meter.exposed_s
    torch.cuda.synchronize()
    assert exposed == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.1)
    assert meter.exposed_s == exposed
