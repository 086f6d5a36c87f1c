"""comm_backend and the odc block: defaults, types, combinations, the in-tree port's keys, and the generated reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.config import COMM_BACKENDS, ODC_KEYS, OdcConfig, parse_odc, parse_options
from primus_odc.errors import ConfigError
from primus_odc.symmetric.liveness import HEARTBEAT_S

REPOSITORY = Path(__file__).resolve().parent.parent


def refusal(block: Any, backend: str | None = "odc_pad") -> str:
    with pytest.raises(ConfigError) as caught:
        parse_odc({"comm_backend": backend, "odc": block})
    (problem,) = caught.value.problems
    return problem


def test_unset() -> None:
    parsed = parse_odc({"num_layers": 2})
    assert parsed.comm_backend is None
    assert parsed.arm == "stock"
    assert parsed.odc == OdcConfig()


def test_defaults() -> None:
    assert asdict(parse_odc({"comm_backend": "odc_nopad", "odc": dict.fromkeys(ODC_KEYS)}).odc) == {
        "transport": "auto",
        "accumulate": "auto",
        "parameters": "auto",
        "memory_budget_gib": None,
        "deterministic": False,
        "verify": "off",
        "timeout_s": 600.0,
        "cost_model": "linear",
        "microbatch_cost": 0.0,
        "max_tokens_per_microbatch": None,
        "over_length": "error",
        "baseline": None,
        "ranks_per_node": None,
        "interface": None,
        "nic": None,
    }


@pytest.mark.parametrize(
    ("backend", "baseline", "arm"),
    [
        ("nccl_pad", None, "nccl_pad"),
        ("nccl_pad", "lb_micro", "nccl_pad"),
        ("nccl_pad", "localsort", "nccl_localsort"),
        ("nccl_pad", "zero2", "nccl_zero2"),
        ("odc_pad", None, "odc_pad"),
        ("odc_nopad", None, "odc_nopad"),
    ],
)
def test_arm(backend: str, baseline: str | None, arm: str) -> None:
    assert parse_odc({"comm_backend": backend, "odc": {"baseline": baseline}}).arm == arm


@pytest.mark.parametrize("backend", COMM_BACKENDS)
def test_one_block_serves_all_arms(backend: str) -> None:
    block = {"transport": "host", "accumulate": "local", "parameters": "resident", "deterministic": True, "verify": "checksum"}
    assert parse_odc({"comm_backend": backend, "odc": SimpleNamespace(**block)}).odc == parse_options(block)


@pytest.mark.parametrize(
    ("key", "given_value", "expected"),
    [
        ("timeout_s", "1e1", 10.0),
        ("timeout_s", 1, 1.0),
        ("timeout_s", 5, 5.0),
        ("memory_budget_gib", "2.5", 2.5),
        ("max_tokens_per_microbatch", "4096", 4096),
        ("max_tokens_per_microbatch", "1e4", 10000),
        ("ranks_per_node", 2.0, 2),
        ("interface", " eth0 ", "eth0"),
        ("nic", "bnxt", "bnxt"),
        ("microbatch_cost", 0, 0.0),
        ("microbatch_cost", "1e4", 10000.0),
        ("deterministic", "True", True),
        ("verify", False, "off"),
        ("cost_model", "attention", "attention"),
        ("cost_model", [1.982122, "2.611821"], (1.982122, 2.611821)),
        ("cost_model", (0, 1), (0.0, 1.0)),
    ],
)
def test_values_are_converted(key: str, given_value: Any, expected: Any) -> None:
    value = getattr(parse_options({key: given_value}), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "given_value", "said"),
    [
        ("timeout_s", 0, "the number 0"),
        ("timeout_s", 0.99, "the number 0.99"),
        ("timeout_s", 604801, "the number 604801"),
        ("timeout_s", "soon", "the text 'soon'"),
        ("timeout_s", float("nan"), "the number nan"),
        ("timeout_s", True, "true"),
        ("memory_budget_gib", -1, "the number -1"),
        ("microbatch_cost", -1, "the number -1"),
        ("microbatch_cost", "much", "the text 'much'"),
        ("max_tokens_per_microbatch", 1.5, "the number 1.5"),
        ("ranks_per_node", [2], "the list [2]"),
        ("interface", 0, "the number 0"),
        ("interface", " ", "the text ' '"),
        ("nic", 5, "the number 5"),
        ("deterministic", 1, "the number 1"),
        ("deterministic", "yes", "the text 'yes'"),
        ("verify", True, "true"),
        ("transport", 3, "the number 3"),
        ("accumulate", SimpleNamespace(mode="local"), "the block {'mode': 'local'}"),
        ("cost_model", [1], "the list [1]"),
        ("cost_model", [0, 0], "the list [0, 0]"),
        ("cost_model", [-1, 2], "the list [-1, 2]"),
        ("cost_model", 2, "the number 2"),
    ],
)
def test_wrong_types_are_answered_with_what_was_given(key: str, given_value: Any, said: str) -> None:
    problem = refusal({key: given_value})
    assert problem.startswith(f"odc.{key} must be ")
    assert f"but {said} was given" in problem


def test_a_time_out_shorter_than_heartbeats_can_tell_is_refused_with_its_range() -> None:
    with pytest.raises(ConfigError, match=r"timeout_s must be a number from 1 to 604800, but the number 0.5 was given"):
        parse_options({"timeout_s": 0.5})
    assert parse_options({"timeout_s": 1}).timeout_s >= 10 * HEARTBEAT_S


def test_block_that_is_no_block() -> None:
    assert "the text 'host'" in refusal("host")


def test_comm_backend_of_another_type() -> None:
    with pytest.raises(ConfigError, match="comm_backend must be a name, but true was given; allowed: nccl_pad, odc_pad, odc_nopad"):
        parse_odc({"comm_backend": True})


def test_baseline_name_as_backend() -> None:
    with pytest.raises(ConfigError, match=r"comm_backend: nccl_pad and odc\.baseline: zero2"):
        parse_odc({"comm_backend": "nccl_zero2"})


def test_deterministic_with_owner() -> None:
    assert "odc.accumulate: owner" in refusal({"deterministic": True, "accumulate": "owner"})
    assert parse_options({"deterministic": True, "accumulate": "auto"}).deterministic


def test_fixed_cost_in_tokens_that_cost_nothing() -> None:
    assert "cost nothing with b = 0" in refusal({"microbatch_cost": 100, "cost_model": [1, 0]})
    assert parse_options({"microbatch_cost": 0, "cost_model": [1, 0]}).microbatch_cost == 0


@pytest.mark.parametrize("backend", ["odc_pad", "odc_nopad", None])
def test_baseline_without_nccl_pad(backend: str | None) -> None:
    assert "set comm_backend: nccl_pad" in refusal({"baseline": "localsort"}, backend)


def test_in_tree_keys_are_migrated_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_odc({"enable_odc": True, "enable_odc_lb_mini": True, "lb_mini_max_token_len": 4096, "odc_p2p_backend": "rocshmem"})
    (problem,) = caught.value.problems
    for pair in (
        "enable_odc: True -> comm_backend: odc_nopad",
        "enable_odc_lb_mini: True -> comm_backend",
        "lb_mini_max_token_len: 4096 -> odc.max_tokens_per_microbatch",
        "odc_p2p_backend: rocshmem -> odc.transport",
    ):
        assert pair in problem


def test_in_tree_keys_at_their_preset_value_ask_for_nothing() -> None:
    params = {"enable_odc": False, "odc_phase": 2, "odc_p2p_backend": "mori", "odc_grad_spike_threshold": 1000, "odc_rocshmem_lib": None}
    assert parse_odc({**params, "comm_backend": "odc_pad"}).comm_backend == "odc_pad"


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["comm_backend", "odc", "enable_odc", "lr"]) | st.text(max_size=12),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(ODC_KEYS) | st.text(max_size=6), inner, max_size=4),
            max_leaves=6,
        ),
        max_size=5,
    )
)
def test_any_parameters_are_parsed_or_refused(params: dict[str, Any]) -> None:
    try:
        parsed = parse_odc(params)
    except ConfigError as error:
        assert error.problems
        return
    assert parsed.comm_backend in (None, *COMM_BACKENDS)
    assert parse_options(asdict(parsed.odc)) == parsed.odc


def test_reference_is_up_to_date() -> None:
    check = [sys.executable, str(REPOSITORY / "scripts" / "config_reference.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_is_not_imported() -> None:
    code = "import sys, primus_odc.config, primus_odc.experiment, primus_odc.versions, primus_odc.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
