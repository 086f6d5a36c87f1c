"""Whether a GPU shows what a network card wrote in the order in which it was written.

A card writes data, then the word. The host sees the word, and the copy or sum it then starts must see the data. A GPU may take such writes
by several ways and reorder them inside; CUDA tells what it promises without a flush (``CUGPUDirectRDMAWritesOrdering``): nothing, that this
GPU sees them in order (``OWNER``), or that every GPU of the machine does (``ALL_DEVICES``). Ranks of one node read each other's memory, so
they need the last, unless every GPU is a node of its own. With ``OWNER`` (an H200's answer) every rank looks at its own words only, and
has what they cover made visible to the other GPUs before it shows them (:mod:`primus_odc.symmetric.relay`): by
``cuFlushGPUDirectRDMAWrites``, which the process that owns the memory has to call.
"""

from __future__ import annotations

import ctypes

import torch

from primus_odc.errors import OdcError

_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_FLUSH_OPTIONS, _BY_HOST = 117, 1  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_OF_THIS_CONTEXT, _TO_ALL_DEVICES = 0, 200
OWNER, ALL_DEVICES = 100, 200
_NAMES = {0: "NONE", OWNER: "OWNER", ALL_DEVICES: "ALL_DEVICES"}


def writes_ordering(device: torch.device) -> int:
    """The driver's answer for a CUDA device: 0, :data:`OWNER` or :data:`ALL_DEVICES`.

    Raises:
        OdcError: the driver does not say.
    """
    return _attribute(device, _WRITES_ORDERING, "in which order a network card's writes are seen")


def can_flush(device: torch.device) -> bool:
    """Whether the host may call :func:`flush_writes`."""
    return bool(_attribute(device, _FLUSH_OPTIONS, "how a network card's writes are flushed") & _BY_HOST)


def flush_writes(device: torch.device) -> None:
    """What a network card has written into memory of this process on ``device`` is seen by all GPUs of the machine from now on
    (``cuFlushGPUDirectRDMAWrites``, CUDA driver API).

    Raises:
        OdcError: the driver refuses.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context the current one, in whatever thread this is
        code = ctypes.CDLL("libcuda.so.1").cuFlushGPUDirectRDMAWrites(_OF_THIS_CONTEXT, _TO_ALL_DEVICES)
    if code:
        raise OdcError(f"{device}: the driver refused to flush a network card's writes (error {code})")


def needs_relay(device: torch.device, name: str, *, read_by_mates: bool) -> bool:
    """Whether words have to be shown by the rank that owns them, because the order is kept for that one's GPU only; ``name``: the rank's,
    for the message.

    Raises:
        OdcError: the GPU does not keep the order in a way that can be used; with what to set, if anything helps.
    """
    found = writes_ordering(device)
    if found >= ALL_DEVICES or (found >= OWNER and not read_by_mates):
        return False
    told = f"{name}: {device} promises the order of a network card's writes to {_NAMES.get(found, found)}"
    if found < OWNER:
        raise OdcError(f"{told}: odc.transport: nvshmem cannot be used between these machines; set comm_backend: nccl_pad")
    if not can_flush(device):
        raise OdcError(
            f"{told}, and its driver has no flush for the host, which is needed where GPUs of a node read each other's memory: set "
            "odc.ranks_per_node: 1, so that none does"
        )
    return True


def _attribute(device: torch.device, attribute: int, what: str) -> int:
    torch.cuda.init()  # and with it the driver
    driver, handle, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    index = device.index if device.index is not None else torch.cuda.current_device()
    code = driver.cuDeviceGet(ctypes.byref(handle), index)
    code = code or driver.cuDeviceGetAttribute(ctypes.byref(found), attribute, handle)
    if code:
        raise OdcError(f"{device}: the driver does not tell {what} (error {code})")
    return found.value
