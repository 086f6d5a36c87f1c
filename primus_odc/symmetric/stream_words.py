"""Control words stored by a device stream, in the order of its work.

A word must not be seen before the data it covers, and the host runs ahead of the device. The driver's stream memory operation writes a
64-bit value to host memory when everything before it in the stream has finished, with a system-wide fence in between
(``cuStreamWriteValue64``: CUDA driver API, "Stream memory operations"; ``hipStreamWriteValue64``: HIP runtime API, of the same name). So no
host thread has to watch events, and a rank whose host sits in somebody else's collective still tells its peers what its device finished.

Only writes happen in streams. Waiting for a word is the host's business: a device synchronisation never depends on a peer.

A writer that is dropped without :meth:`StreamWriter.close` is collected in whatever thread and at whatever moment the garbage collector
runs, where no call of the driver is safe: its memory is set aside, mapped and pinned, and unpinned when the next writer is made. At the end
of the process the driver frees it.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

from primus_odc.errors import OdcError

_HOST_REGISTER_MAPPED = 2  # cudaHostRegisterMapped, hipHostRegisterMapped


_DROPPED: list[tuple[torch.Tensor, torch.device]] = []
"""Pinned memory of writers that nobody closed."""


class StreamWriter:
    """Writes 64-bit words into pinned host memory from the current stream of one device.

    Args:
        memory: one-dimensional, in host memory, begins with a page; whole pages are pinned, and it is kept alive until they no
            longer are.
        device: a CUDA (or ROCm) device.

    Raises:
        OdcError: the memory cannot be pinned, or that of a dropped writer cannot be unpinned.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._address = memory.data_ptr()
        if self._address % mmap.PAGESIZE:
            raise ValueError(f"address {self._address:#x} is not aligned to a page")
        while _DROPPED:
            _unpin(*_DROPPED.pop())
        self._device = device
        self._write_value = _stream_write_value()
        nbytes = memory.nbytes
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(self._address, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, _HOST_REGISTER_MAPPED))
        if code:
            raise OdcError(
                f"{device}: the control words ({nbytes} bytes) cannot be pinned for the device (cudaHostRegister error {code}): raise the "
                "limit of locked memory (ulimit -l), in a container with --ulimit memlock=-1"
            )
        self._pinned = (memory, device)
        self._finalizer = weakref.finalize(self, _DROPPED.append, self._pinned)
        self._finalizer.atexit = False

    def write(self, offset: int, value: int) -> None:
        """Store ``value`` at byte ``offset`` once the current stream has got here."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        code = self._write_value(ctypes.c_void_p(stream), ctypes.c_void_p(self._address + offset), ctypes.c_uint64(value), ctypes.c_uint(0))
        if code:
            raise OdcError(f"{self._device}: the driver refused to write a control word from a stream (error {code})")

    def close(self) -> None:
        """Wait for the device and unpin the memory; nothing where that has happened."""
        if self._finalizer.detach() is not None:
            _unpin(*self._pinned)


def _unpin(memory: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a stream may still have words to write
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if code:
        raise OdcError(f"{device}: the control words cannot be unpinned (cudaHostUnregister error {code})")


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
