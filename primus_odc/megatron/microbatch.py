"""A packed microbatch as the model takes it: samples laid end to end, with everything the host must know still on the host.

The lengths of the samples, the positions whose prediction counts and the number of them are read from host arrays once, when the microbatch
is made. Nothing in forward or backward reads them back from the device, so a rank never waits for its own device in the middle of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from primus_odc.data.packing import PackedMicrobatch
from primus_odc.errors import DataError


@dataclass
class PackedSamples(PackedSeqParams):
    """Megatron's description of a packed sequence, with the lengths as plain numbers and the borders on the device too.

    `cu_seqlens_q` and `cu_seqlens_kv` are host tensors on purpose: Megatron's rotary embedding reads them in every layer.
    """

    lengths: tuple[int, ...] = field(default=())
    """Tokens of each sample."""
    device_cu_seqlens: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32, device="cpu"))
    """int32 [samples + 1] on the model's device, for kernels that take all samples at once."""

    @classmethod
    def of(cls, cu_seqlens: npt.NDArray[np.int32], device: torch.device) -> PackedSamples:
        """``cu_seqlens``: int32 [samples + 1], rising from 0 to the number of tokens."""
        lengths = tuple(int(n) for n in np.diff(cu_seqlens))
        host = torch.from_numpy(np.ascontiguousarray(cu_seqlens, dtype=np.int32))
        return cls(
            qkv_format="thd",
            cu_seqlens_q=host,
            cu_seqlens_kv=host,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            device_cu_seqlens=to_device(host, device),
        )


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` itself on the CPU; else a copy that is queued without waiting for the device, from page-locked memory.

    The copy is made in the device's current stream: whatever is queued there afterwards finds it done.
    """
    if device.type == "cpu":
        return host
    # In another thread than the main one the current device is the first, where page-locking would make a context of its own.
    with torch.cuda.device(device):
        return host.pin_memory().to(device, non_blocking=True)


@dataclass(kw_only=True, slots=True, frozen=True)
class Microbatch:
    """One packed microbatch of T tokens, n of which are predicted and counted in the loss."""

    tokens: torch.Tensor
    """int64 [1, T] on the model's device."""
    position_ids: torch.Tensor
    """int64 [1, T] on the model's device."""
    target_index: torch.Tensor
    """int64 [n] on the model's device: positions whose next token counts."""
    targets: torch.Tensor
    """int64 [n] on the model's device: those next tokens."""
    packed: PackedSamples
    """Where the samples begin and end."""

    @property
    def num_targets(self) -> int:
        """n, known without asking the device."""
        return int(self.targets.shape[0])

    @classmethod
    def of(cls, arrays: PackedMicrobatch, device: torch.device) -> Microbatch:
        """Copy a packed microbatch to `device`.

        Raises:
            DataError: the sample borders do not divide the tokens into samples of at least one token.
        """
        borders = arrays.cu_seqlens
        if len(borders) < 2 or borders[0] != 0 or borders[-1] != len(arrays.tokens) or (np.diff(borders) < 1).any():
            raise DataError(f"cu_seqlens {borders.tolist()} does not divide {len(arrays.tokens)} tokens into samples of at least one token")
        counted = np.flatnonzero(arrays.loss_mask)

        def put(values: npt.NDArray[np.int64]) -> torch.Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)), device)

        return cls(
            tokens=put(arrays.tokens)[None],
            position_ids=put(arrays.position_ids)[None],
            target_index=put(counted),
            targets=put(arrays.labels[counted]),
            packed=PackedSamples.of(borders, device),
        )
