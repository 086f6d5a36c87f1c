"""Keys beside the ``odc:`` block that were meant for us: misspelt, misplaced, or of the port that ships inside Primus.

A trainer module holds hundreds of keys of Primus, Megatron and the user, none of which we may refuse. A key is taken for ours only when
it is nearly ``comm_backend``, nearly ``odc`` and holds a block, begins with ``odc_`` or ``lb_mini_``, or is nearly one of the in-tree
port's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from primus_odc._config_values import as_mapping, describe, nearest

# Below this similarity a key is somebody else's: enable_ocd is 0.90 from enable_odc, Megatron's enable_msc 0.80, video_backend 0.72 from
# comm_backend.
_SIMILAR = 0.85

# Keys of the in-tree port: the value its presets give them, which every Primus preset carries and which asks for nothing, and what
# replaces the key.
IN_TREE_KEYS: dict[str, tuple[Any, str]] = {
    "enable_odc": (False, "comm_backend: odc_nopad (or odc_pad)"),
    "enable_odc_lb_mini": (False, "comm_backend: odc_nopad (or odc_pad, or nccl_pad for equal counts on collectives)"),
    "lb_mini_max_token_len": (0, "odc.max_tokens_per_microbatch"),
    "lb_mini_cost_model": ("linear", "odc.cost_model (fit is now attention, or [a, b])"),
    "odc_phase": (2, "nothing, gradients always go on demand"),
    "odc_grad_spike_threshold": (1000.0, "nothing, gradients are exact; clip_grad limits their norm"),
    "odc_p2p_backend": ("mori", "odc.transport"),
    "odc_mori_init": ("pg", "nothing, found out by odc.transport"),
    "odc_max_buffer_size": (67108864, "nothing, the arena is sized from the model"),
    "odc_rocshmem_gda": (False, "odc.transport: mori"),
    "odc_rocshmem_lib": (None, "odc.transport: mori"),
    "odc_gda_rs_blocks": (64, "nothing"),
    "odc_gda_pipe": (1, "nothing"),
    "odc_gda_defer_reduce": ("auto", "odc.accumulate (local for 1, owner for 0)"),
    "odc_gda_warmup_mode": ("strided", "nothing, no warm-up is needed"),
    "odc_gda_stride_bytes": (65536, "nothing, no warm-up is needed"),
}


def misplaced_keys(params: Mapping[str, Any], odc_keys: Sequence[str], *, active: bool) -> list[str]:
    """A sentence for every key of the trainer module that was meant for us and would have no effect.

    Args:
        params: the module's parameters.
        odc_keys: the keys of the ``odc:`` block.
        active: whether ``comm_backend`` is set. Only then are block keys without their block (``transport: host``) taken for ours.
    """
    problems: list[str] = []
    migrated: list[str] = []
    for key, value in params.items():
        if key in ("comm_backend", "odc"):
            continue
        if key in IN_TREE_KEYS:
            inert, replacement = IN_TREE_KEYS[key]
            if value is not None and value != inert:
                migrated.append(f"{key}: {value} -> {replacement}")
        elif active and key in odc_keys:
            problems.append(f"{key} belongs into the odc block; write odc: {{{key}: {value}}}")
        else:
            problem = _misspelt(str(key), value, odc_keys)
            if problem is not None:
                problems.append(problem)
    if migrated:
        problems.append("keys of Primus' in-tree ODC are replaced (old -> new): " + "; ".join(migrated))
    return problems


def _misspelt(key: str, value: Any, odc_keys: Sequence[str]) -> str | None:
    plain = key.lower().replace("-", "_")
    if plain == "comm_backend" or resembles(plain, "comm_backend"):
        return f"{key} is not known, did you mean 'comm_backend'?"
    if plain == "odc" or (as_mapping(value) is not None and sorted(plain) == ["c", "d", "o"]):
        return f"{key} is not known, did you mean 'odc' ({describe(value)} was given)?"
    old = nearest(plain, tuple(IN_TREE_KEYS))
    if resembles(plain, old):
        return f"{key} is not known, did you mean {old!r}? That is a key of Primus' in-tree ODC; it is now {IN_TREE_KEYS[old][1]}"
    if plain.startswith("odc_"):
        meant = nearest(plain.removeprefix("odc_"), odc_keys)
        return f"{key} is not known, did you mean odc: {{{meant}: ...}}? keys of the block: {', '.join(odc_keys)}"
    if plain.startswith("lb_mini_"):
        return f"{key} is not known, did you mean {old!r}? That is a key of Primus' in-tree ODC; it is now {IN_TREE_KEYS[old][1]}"
    return None


def resembles(key: str, ours: str) -> bool:
    """Whether ``key`` is so near to ``ours`` that it was meant."""
    return difflib.SequenceMatcher(None, key, ours).ratio() >= _SIMILAR
