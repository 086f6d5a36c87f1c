"""T28: torch or megatron-core outside the tested range, or an FSDP2 hook missing or changed, is refused at start with versions and name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from primus_odc.errors import OdcError, VersionError
from primus_odc.versions import FSDP2_HOOKS, require_fsdp2, require_megatron, require_torch


def fake_megatron(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    core = ModuleType("megatron.core")
    core.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)


def test_this_environment_is_in_range() -> None:
    require_torch()
    require_fsdp2()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+rocm7.2.git1234", "2.12.1+cu130", "2.13.0rc2", "2.13.9"])
def test_torch_in_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "2.14.0a0", "1.13.1", "3.0.0", "2.2.0", "unknown"])
def test_torch_out_of_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for require in (require_torch, require_fsdp2):
        with pytest.raises(VersionError) as caught:
            require()
        message = str(caught.value)
        assert f"torch {version} is outside the tested range torch>=2.11,<2.14" in message
        assert "pip install 'torch>=2.11,<2.14'" in message


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.16.0rc0"])
def test_megatron_in_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_megatron(monkeypatch, version)
    require_megatron()


@pytest.mark.parametrize("version", ["0.15.3", "0.17.0rc1", "1.16.0"])
def test_megatron_out_of_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_megatron(monkeypatch, version)
    with pytest.raises(VersionError, match=f"megatron-core {version} is outside the tested range megatron-core>=0.16,<0.17; .*pip install"):
        require_megatron()


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(VersionError, match=r"torch cannot be imported .*pip install 'torch>=2\.11,<2\.14'"):
        require_torch()
    with pytest.raises(VersionError, match=r"megatron-core cannot be imported .*pip install 'megatron-core>=0\.16,<0\.17'"):
        require_megatron()


@pytest.mark.parametrize("hook", FSDP2_HOOKS)
def test_missing_hook(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    monkeypatch.delattr(FSDPModule, hook)
    with pytest.raises(VersionError) as caught:
        require_fsdp2()
    message = str(caught.value)
    assert f"FSDPModule.{hook} is missing" in message
    assert torch.__version__ in message
    assert "torch>=2.11,<2.14" in message


def renamed_parameter(self: FSDPModule, communication: Any) -> None: ...


def new_demanded_parameter(self: FSDPModule, comm: Any, group: Any) -> None: ...


@pytest.mark.parametrize(("changed", "shown"), [(renamed_parameter, "(communication)"), (new_demanded_parameter, "(comm, group)")])
def test_hook_with_another_signature(monkeypatch: pytest.MonkeyPatch, changed: Any, shown: str) -> None:
    monkeypatch.setattr(FSDPModule, "set_custom_all_gather", changed)
    with pytest.raises(VersionError) as caught:
        require_fsdp2()
    assert f"FSDPModule.set_custom_all_gather takes {shown} where (comm) is needed" in str(caught.value)


def test_new_optional_parameters_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    def extended(self: FSDPModule, comm: Any, stream: Any = None, *args: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(FSDPModule, "set_custom_all_gather", extended)
    require_fsdp2()


def test_all_misfits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "reshard")
    monkeypatch.setattr(FSDPModule, "set_custom_reduce_scatter", renamed_parameter)
    with pytest.raises(OdcError, match=r"set_custom_reduce_scatter takes .*; FSDPModule\.reshard is missing"):
        require_fsdp2()
