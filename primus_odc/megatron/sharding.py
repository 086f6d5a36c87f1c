"""Stock FSDP2 for a GPT: one unit for each transformer block, one for all the rest, default prefetch, nothing of ours.

Every arm trains the model sharded by this function, with the same units, so that arms differ in communication and plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from primus_odc.errors import ConfigError
from primus_odc.megatron.model import PackedGPT


def mixed_precision(params: Mapping[str, Any], *, on_demand: bool = False) -> MixedPrecisionPolicy:
    """The policy that Megatron's `bf16` and `grad_reduce_in_bf16` keys ask for. Sharded parameters stay fp32 master weights.

    `on_demand`: the engine sums in fp32 whatever FSDP2 hands over, and the gradients autograd made are bf16; they are handed over as they
    are, which rounds nothing and moves half the bytes.
    """
    if not params.get("bf16", False):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduce_dtype = torch.bfloat16 if on_demand or params.get("grad_reduce_in_bf16", False) else torch.float32
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def shard_gpt(
    model: PackedGPT,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int = True,
    *,
    separate_head: bool = False,
) -> PackedGPT:
    """Shard a built model in place with FSDP2 and return it.

    Args:
        model: from `build_gpt`, parameters in fp32.
        mesh: 1-D for FSDP, 2-D (replicate, shard) for HSDP.
        mp_policy: `mixed_precision(params)`.
        reshard_after_forward: of the blocks. The root and the head keep their parameters until backward, which needs the head's at once.
        separate_head: make the output head a unit of its own, whose gradient is complete before that of any block; else it belongs to
            the root, whose gradient is complete last.

    Raises:
        ConfigError: the policy would round the rotary angles.
    """
    if mp_policy.cast_forward_inputs and mp_policy.param_dtype not in (None, torch.float32):
        raise ConfigError(
            [f"cast_forward_inputs would round rotary angles to {mp_policy.param_dtype} at every block; use cast_forward_inputs=False"]
        )
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)
    if separate_head:
        fully_shard(model.output_layer, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    return model
