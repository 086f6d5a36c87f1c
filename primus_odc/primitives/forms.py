"""How large the kernels of :mod:`primus_odc.primitives.kernels` are: programs of a launch, and what each has under way.

A sum over peers waits for links: one answers after about two microseconds, so what it carries is what has been asked of it by then. Few
programs that ask for much before they need the first of it take as little of the device as possible from the backward pass beside them
(two H200, fp32 of two ranks: 16 programs with 128 KiB each reach 325 GB/s; 32 with the 16 KiB of one block of one source 167).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

PROGRAMS = 16
"""Beside backward, whose kernels need whole multiprocessors."""
PROGRAMS_ALONE = 64
"""Where nothing is computed."""
PROGRAMS_HERE = 256
"""Likewise, where all memory is this device's own, which is wider than the links."""
IN_FLIGHT = 128 << 10
"""Bytes that a program asks for ahead, at most."""
_LARGEST_BLOCK, _SMALLEST_BLOCK = 16384, 1024
_MOST_WARPS = 16
"""As many threads as a program may have on AMD, where a warp has 64."""
_STAGES = 3
"""Two blocks under way while one is added; one block of twice the size is a third slower (measured: 205 against 132 us)."""
_LAYOUTS = 20 << 10
"""Shared memory that a kernel takes to change the layout of a block, generously."""


def form(sources: int, nbytes: int, room: int) -> tuple[int, int, int]:
    """(numbers in a block, warps, stages of the pipeline) for a sum over ``sources`` that cost ``nbytes`` a number each.

    Blocks that are under way lie in shared memory on NVIDIA and in registers on AMD; there may be ``room`` bytes of them.
    """
    most = min(IN_FLIGHT, room)
    block = _LARGEST_BLOCK
    while block > _SMALLEST_BLOCK and (_STAGES - 1) * sources * block * nbytes > most:
        block //= 2
    return block, min(_MOST_WARPS, max(4, block // 512)), 1 + min(_STAGES - 1, most // (sources * block * nbytes))


@cache  # asked for every addition
def room(device: torch.device, aligned: bool) -> int:
    """Bytes that a program on ``device`` may have under way: half as many where nothing is aligned, which takes more registers."""
    if device.type != "cuda" or torch.version.hip:
        most = IN_FLIGHT
    else:
        properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of them
        most = int(properties.shared_memory_per_block_optin) - _LAYOUTS
    return most if aligned else min(most, IN_FLIGHT) // 2
