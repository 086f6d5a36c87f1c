"""Which transport is taken or refused, and what follows from it: nodes, modes, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primus_odc.config import parse_options
from primus_odc.errors import ConfigError, OdcError
from primus_odc.fsdp import choices
from primus_odc.fsdp.choices import decide, memory_of, resolve_transport
from primus_odc.primitives.nodes import Across, group_into_nodes
from tests.primitives.groups import make_group

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries whose module is there, as the test leaves them."""
    present: list[str] = ["nvshmem", "mori"]

    def load(library: str) -> None:
        if library not in present:
            raise OdcError(f"odc.transport: {library} needs the kernels, build it")

    monkeypatch.setattr(choices, "load_extension", load)
    return present


def on(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if vendor == "NVIDIA" else None)
    monkeypatch.setattr(torch.version, "hip", "7.0" if vendor == "AMD" else None)


@pytest.mark.parametrize(
    ("vendor", "asked", "device_type", "machines", "taken"),
    [
        ("NVIDIA", "auto", "cuda", 1, "symm_mem"),
        ("NVIDIA", "auto", "cuda", 2, "nvshmem"),
        ("AMD", "auto", "cuda", 1, "symm_mem"),
        ("AMD", "auto", "cuda", 2, "mori"),
        ("NVIDIA", "nvshmem", "cuda", 1, "nvshmem"),
        ("AMD", "mori", "cuda", 3, "mori"),
        ("neither", "mori", "cuda", 1, "mori"),
        ("neither", "auto", "cpu", 1, "host"),
    ],
)
def test_transports(
    monkeypatch: pytest.MonkeyPatch, built: list[str], vendor: str, asked: str, device_type: str, machines: int, taken: str
) -> None:
    on(monkeypatch, vendor)
    assert resolve_transport(parse_options({"transport": asked}), device_type, machines) == taken


@pytest.mark.parametrize(
    ("vendor", "options", "device_type", "machines", "said"),
    [
        ("NVIDIA", {"transport": "mori"}, "cuda", 1, "mori is for AMD GPUs, and this torch for NVIDIA: set odc.transport: nvshmem"),
        ("AMD", {"transport": "nvshmem"}, "cuda", 2, "nvshmem is for NVIDIA GPUs, and this torch for AMD: set odc.transport: mori"),
        ("NVIDIA", {"transport": "nvshmem"}, "cpu", 1, "nvshmem does not reach tensors on cpu; set odc.transport: host"),
        ("NVIDIA", {"transport": "host"}, "cuda", 1, "host does not reach tensors on cuda; set odc.transport: symm_mem"),
        ("NVIDIA", {"transport": "host"}, "cuda", 2, "host does not reach tensors on cuda; set odc.transport: nvshmem"),
        (
            "NVIDIA",
            {"transport": "symm_mem"},
            "cuda",
            2,
            "reaches the ranks of one node and there are 2; set NNODES=1, or odc.transport: nvshmem",
        ),
        ("NVIDIA", {}, "cpu", 2, "host reaches the ranks of one node and there are 2; set NNODES=1, or comm_backend: nccl_pad"),
        ("NVIDIA", {"transport": "nvshmem", "accumulate": "owner"}, "cuda", 1, "set odc.accumulate: local"),
        ("AMD", {"accumulate": "owner"}, "cuda", 2, "odc.transport: mori (these ranks are on 2 machines, which nothing else reaches)"),
        ("NVIDIA", {}, "xpu", 1, "no transport reaches tensors on xpu"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, built: list[str], vendor: str, options: dict[str, Any], device_type: str, machines: int, said: str
) -> None:
    on(monkeypatch, vendor)
    with pytest.raises(ConfigError) as caught:
        resolve_transport(parse_options(options), device_type, machines)
    assert said in "\n".join(caught.value.problems)


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch, built: list[str]) -> None:
    on(monkeypatch, "NVIDIA")
    built.clear()
    for options, machines, reason in (
        ({"transport": "nvshmem"}, 1, ""),
        ({}, 2, " (these ranks are on 2 machines, which nothing else reaches)"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_transport(parse_options(options), "cuda", machines)
        assert list(caught.value.problems) == [f"odc.transport: nvshmem needs the kernels, build it{reason}"]


def test_a_library_adds_gradients_up_locally_and_its_heap_counts() -> None:
    groups = [make_group("a", ((1000, 100, True),), 2, 0)]
    chosen = decide(parse_options({}), groups, "nvshmem", CPU, 1.0, "a test")
    assert (chosen.accumulate, chosen.nodes) == ("local", 1) and "which is the only mode of nvshmem" in chosen.reason
    memory = memory_of(groups, "local", "nvshmem", CPU, Across(), verify=False)
    assert memory["library"] + memory["shards"] + memory["gradients"] == 512 << 20  # a granule of the heap
    assert "library" not in memory_of(groups, "local", "symm_mem", CPU, Across(), verify=False)


def test_nodes_are_machines_unless_told_otherwise() -> None:
    ranks, machines = [0, 4, 1, 5], ["a", "b", "a", "b"]
    nodes = group_into_nodes(ranks, None, 2, machines)
    assert nodes is not None and nodes.members == ((0, 2), (1, 3))
    assert group_into_nodes(ranks, None, 2, ["a"] * 4) is None and group_into_nodes(ranks, None, 2) is None
    single = group_into_nodes(ranks, 1, 2, machines)
    assert single is not None and single.members == ((0,), (2,), (1,), (3,))
    with pytest.raises(ConfigError, match="ranks_per_node: 8 puts global ranks 0 and 4, which run on different machines"):
        group_into_nodes(ranks, 8, 2, machines)
