"""Whether a GPU shows what a network card wrote in the order in which it was written.

A card writes data, then the word. The host sees the word, and the copy or sum it then starts must see the data. A GPU may take such writes
by several ways and reorder them inside; CUDA tells what it promises without a flush (``CUGPUDirectRDMAWritesOrdering``): nothing, that this
GPU sees them in order (``OWNER``), or that every GPU of the machine does (``ALL_DEVICES``). Ranks of one node read each other's memory, so
they need the last, unless every GPU is a node of its own. ``cuFlushGPUDirectRDMAWrites`` would have to be called by the process that owns
the memory, and nobody there waits for the word.
"""

from __future__ import annotations

import ctypes

import torch

from primus_odc.errors import OdcError

_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
OWNER, ALL_DEVICES = 100, 200
_NAMES = {0: "NONE", OWNER: "OWNER", ALL_DEVICES: "ALL_DEVICES"}


def writes_ordering(device: torch.device) -> int:
    """The driver's answer for a CUDA device: 0, :data:`OWNER` or :data:`ALL_DEVICES`.

    Raises:
        OdcError: the driver does not say.
    """
    torch.cuda.init()  # and with it the driver
    driver, handle, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    index = device.index if device.index is not None else torch.cuda.current_device()
    code = driver.cuDeviceGet(ctypes.byref(handle), index)
    code = code or driver.cuDeviceGetAttribute(ctypes.byref(found), _WRITES_ORDERING, handle)
    if code:
        raise OdcError(f"{device}: the driver does not tell in which order a network card's writes are seen (error {code})")
    return found.value


def require_write_order(device: torch.device, name: str, *, read_by_mates: bool) -> None:
    """Refuse a GPU that does not keep the order; ``name``: the rank's, for the message.

    Raises:
        OdcError: with what to set, if anything helps.
    """
    found, needed = writes_ordering(device), ALL_DEVICES if read_by_mates else OWNER
    if found >= needed:
        return
    told = f"{name}: {device} promises the order of a network card's writes to {_NAMES.get(found, found)}, and {_NAMES[needed]} is needed"
    if found >= OWNER:
        raise OdcError(f"{told} where GPUs of a node read each other's memory: set odc.ranks_per_node: 1, so that none does")
    raise OdcError(f"{told}: odc.transport: nvshmem cannot be used between these machines; set comm_backend: nccl_pad")
