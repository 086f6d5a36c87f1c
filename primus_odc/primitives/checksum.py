"""Checksums of transferred segments (``odc.verify: checksum``).

CRC-32 seeded with the epoch: it finds every single flipped byte, and bytes of an older epoch do not match the newer checksum even if
the values barely changed.
"""

from __future__ import annotations

import zlib

import torch

from primus_odc.errors import VerificationError


def checksum(data: torch.Tensor, epoch: int) -> int:
    """CRC-32 of a contiguous tensor's bytes, seeded with ``epoch``; of a device tensor it waits for the current stream."""
    return zlib.crc32(data.reshape(-1).view(torch.uint8).cpu().numpy().data, epoch & 0xFFFFFFFF)


def check(data: torch.Tensor, epoch: int, expected: int, what: str) -> None:
    """Raise :class:`VerificationError` naming ``what`` if ``data`` is not what its owner announced."""
    if (found := checksum(data, epoch)) != expected:
        raise VerificationError(
            f"{what}: checksum {found:#010x} differs from the announced {expected:#010x}: the bytes are corrupted or stale. "
            "Do not continue this run; check memory and mapping of the two ranks"
        )
