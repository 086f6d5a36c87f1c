"""For tests only: lets Megatron, which asks for CUDA everywhere, train on the CPU over gloo.

Every CUDA device is mapped to the CPU, streams and events do nothing, and CUDA's random numbers are the CPU's. Only what a run of Primus
was seen to touch is covered.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Nothing:
    """A stream or an event."""

    priority = cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()

    def _pass(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _pass


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if function is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], int) and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return device.startswith("cuda") if isinstance(device, str) else type(device) is int


def install() -> None:
    """Called by Primus before it builds Megatron's arguments."""
    properties = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=8 << 30, multi_processor_count=2, gcnArchName="", warp_size=32)
    functions: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "init": None,
        "_lazy_init": None,
        "device_count": 8,
        "current_device": CPU,
        "set_device": None,
        "get_device_properties": properties,
        "get_device_name": "CPU",
        "get_device_capability": (9, 0),
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "manual_seed_all": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "mem_get_info": (8 << 30, 8 << 30),
        "is_current_stream_capturing": False,
    }
    for name, value in functions.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    others = {
        "memory_stats": lambda *args, **kwargs: {},
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "nvtx": SimpleNamespace(range_push=lambda *args: None, range_pop=lambda *args: None),
    }
    for name, value in others.items():
        setattr(torch.cuda, name, value)
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    native_type = tensor.type

    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron asserts that gradients are of a CUDA type.
        result = native_type(self, *args, **kwargs)
        return f"torch.cuda.{result.rpartition('.')[2]}" if isinstance(result, str) else result

    tensor.type = cuda_type
    _CudaIsCpu().__enter__()
    _megatron()


def _megatron() -> None:
    # Megatron's compiled helpers lie in a folder of ours, so that its checkout stays as it is.
    importlib.import_module("megatron.core.datasets").__path__.append(os.environ["MEGATRON_HELPERS"])
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    importlib.import_module("megatron.core.parallel_state").get_nccl_options = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    mesh: Any = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
    from_group = mesh.from_group
    mesh.from_group = staticmethod(lambda group, device_type, *args, **kwargs: from_group(group, "cpu", *args, **kwargs))
    # Megatron finds the optimizer's state by the identity of the local tensor, which torch 2.13 makes anew at each to_local().
    optimizer: Any = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    optimizer.to_local_if_dtensor = lambda value: getattr(value, "_local_tensor", value)
    # Megatron's report on reruns names attributes that its record does not have.
    caller: Any = importlib.import_module("megatron.core.rerun_state_machine").Caller
    caller.filename, caller.lineno = "", 0
