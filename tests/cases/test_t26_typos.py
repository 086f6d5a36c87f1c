"""T26: a typo in a key or a value is an error with the nearest name and the allowed values, never ignored; all are reported at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from primus_odc.config import ParsedComm, parse_odc
from primus_odc.errors import ConfigError


def problems_of(params: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_odc(params)
    return caught.value.problems


def test_enable_ocd() -> None:
    (problem,) = problems_of({"enable_ocd": True})
    assert problem.startswith("enable_ocd ")
    assert "'enable_odc'" in problem
    assert "comm_backend: odc_nopad" in problem


def test_comm_backend_value() -> None:
    (problem,) = problems_of({"comm_backend": "odc_nopd"})
    assert "'odc_nopd'" in problem
    assert "did you mean 'odc_nopad'" in problem
    assert "nccl_pad, odc_pad, odc_nopad" in problem


@pytest.mark.parametrize("block", [{"transport": "rocshm"}, SimpleNamespace(transport="rocshm")])
def test_transport_value(block: Any) -> None:
    (problem,) = problems_of({"comm_backend": "odc_pad", "odc": block})
    assert problem.startswith("odc.transport ")
    assert "did you mean 'mori'" in problem  # takes the place of rocSHMEM
    assert "auto, host, symm_mem, nvshmem, mori" in problem


def test_all_at_once() -> None:
    problems = problems_of({"comm_backend": "odc_nopd", "enable_ocd": True, "odc": {"transport": "rocshm", "timout_s": 3}})
    assert len(problems) == 4
    with pytest.raises(ConfigError, match="4 problems"):
        parse_odc({"comm_backend": "odc_nopd", "enable_ocd": True, "odc": {"transport": "rocshm", "timout_s": 3}})


@pytest.mark.parametrize(
    ("params", "key", "meant"),
    [
        ({"comm_backnd": "odc_pad"}, "comm_backnd", "'comm_backend'"),
        ({"comm-backend": "odc_pad"}, "comm-backend", "'comm_backend'"),
        ({"COMM_BACKEND": "odc_pad"}, "COMM_BACKEND", "'comm_backend'"),
        ({"ocd": {"transport": "host"}}, "ocd", "'odc'"),
        ({"ODC": None}, "ODC", "'odc'"),
        ({"odc_transport": "host"}, "odc_transport", "odc: {transport: ...}"),
        ({"odc_verfy": "checksum"}, "odc_verfy", "odc: {verify: ...}"),
        ({"enable_odc_lb_min": True}, "enable_odc_lb_min", "'enable_odc_lb_mini'"),
        ({"lb_mini_max_tokens": 5}, "lb_mini_max_tokens", "'lb_mini_max_token_len'"),
        ({"comm_backend": "odc_pad", "transport": "host"}, "transport", "odc: {transport: host}"),
    ],
)
def test_keys_beside_the_block(params: dict[str, Any], key: str, meant: str) -> None:
    (problem,) = problems_of(params)
    assert problem.startswith(f"{key} ")
    assert meant in problem


@pytest.mark.parametrize(
    "key",
    # Keys of Megatron, Primus and other launchers that are near ours.
    [
        "backend",
        "video_backend",
        "turbo_gemm_backend",
        "distributed_backend",
        "attention_backend",
        "enable_msc",
        "enable_lora",
        "enable",
        "deterministic_mode",
        "comm",
        "gpus_per_node",
        "nics_per_node",
        "timeout_minutes",
        "distributed_timeout_minutes",
        "seq_length",
        "params",
        "transport_split",
        "cost",
    ],
)
@pytest.mark.parametrize("backend", [None, "odc_nopad"])
def test_other_peoples_keys_pass(key: str, backend: str | None) -> None:
    assert isinstance(parse_odc({key: "x", "comm_backend": backend}), ParsedComm)
