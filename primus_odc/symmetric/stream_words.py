"""Control words stored by a device stream, in the order of its work.

A word must not be seen before the data it covers, and the host runs ahead of the device. The driver's stream memory operation writes a
64-bit value to host memory when everything before it in the stream has finished, with a system-wide fence in between
(``cuStreamWriteValue64``: CUDA driver API, "Stream memory operations"; ``hipStreamWriteValue64``: HIP runtime API, of the same name). So no
host thread has to watch events, and a rank whose host sits in somebody else's collective still tells its peers what its device finished.

Only writes happen in streams. Waiting for a word is the host's business: a device synchronisation never depends on a peer.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from primus_odc.errors import OdcError

_HOST_REGISTER_MAPPED = 2  # cudaHostRegisterMapped, hipHostRegisterMapped


class StreamWriter:
    """Writes 64-bit words into pinned host memory from the current stream of one device.

    Args:
        address: start of the memory, aligned to pages.
        nbytes: its size; whole pages are pinned.
        device: a CUDA (or ROCm) device.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        if address % mmap.PAGESIZE:
            raise ValueError(f"address {address:#x} is not aligned to a page")
        self._address = address
        self._device = device
        self._write_value = _stream_write_value()
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, _HOST_REGISTER_MAPPED))
        if code:
            raise OdcError(
                f"{device}: the control words ({nbytes} bytes) cannot be pinned for the device (cudaHostRegister error {code}): raise the "
                "limit of locked memory (ulimit -l), in a container with --ulimit memlock=-1"
            )

    def write(self, offset: int, value: int) -> None:
        """Store ``value`` at byte ``offset`` once the current stream has got here."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        code = self._write_value(ctypes.c_void_p(stream), ctypes.c_void_p(self._address + offset), ctypes.c_uint64(value), ctypes.c_uint(0))
        if code:
            raise OdcError(f"{self._device}: the driver refused to write a control word from a stream (error {code})")

    def close(self) -> None:
        """Unpin the memory; the device must have finished."""
        code = int(torch.cuda.cudart().cudaHostUnregister(self._address))
        if code:
            raise OdcError(f"{self._device}: the control words cannot be unpinned (cudaHostUnregister error {code})")


def _stream_write_value():  # type: ignore[no-untyped-def]  # a ctypes function
    if torch.version.hip is not None:
        library, name = _loaded("libamdhip64.so"), "hipStreamWriteValue64"
    else:
        library, name = "libcuda.so.1", "cuStreamWriteValue64_v2"
    function = getattr(ctypes.CDLL(library), name)
    function.restype = ctypes.c_int
    return function


def _loaded(name: str) -> str:
    """Path of a library this process has loaded already: another copy would have another runtime in it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if name in path.rsplit("/", 1)[-1]:
                return path
    raise OdcError(f"this torch was built for ROCm but has not loaded {name}")
