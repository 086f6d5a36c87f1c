"""The kernel that looks for edits: its values under Triton's interpreter, and that it compiles for every architecture it is meant for."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import pytest
import torch

from primus_odc.primitives.forms import IN_FLIGHT, form

KINDS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32), (torch.float16, torch.float16)]
"""Dtypes of parameters and of what is published, of those that the interpreter casts and compares as devices do (all: tests/gpu)."""
TARGETS = [("hip", "gfx942", 64), ("hip", "gfx950", 64), ("cuda", 90, 32)]


def differing(rounds: int) -> list[tuple[list[int], list[int]]]:
    """(what was found, what torch finds) of each round, for five groups of parameters of which some were edited in one place."""
    from primus_odc.primitives.differences import Differences

    found = []
    rng = random.Random(rounds)
    for _ in range(rounds):
        pairs, expected = [], [0] * 5
        for _ in range(rng.randint(1, 9)):
            group, numel = rng.randrange(5), rng.choice([0, 1, 7, 4096, 4097, (1 << 18) - 1, (1 << 18) + 1, 600_000])
            own_dtype, published_dtype = rng.choice(KINDS)
            # The interpreter cuts numbers off where it casts to bf16, and devices round: numbers that have no more than bf16 has.
            own = torch.randn(numel).bfloat16().to(own_dtype)
            published = own.to(published_dtype)
            if numel and rng.random() < 0.3:
                place = rng.randrange(numel)
                own[place] = published[place] = float("nan")
            if numel and rng.random() < 0.3:
                published[rng.choice([0, numel - 1, rng.randrange(numel)])] = rng.choice([3.5, float("inf"), float("nan")])
            cast = own.to(published_dtype)
            expected[group] |= int(not torch.equal(cast.nan_to_num(1e4), published.nan_to_num(1e4)))
            pairs.append((group, own, published))
        flags = torch.zeros(5, dtype=torch.uint8)
        Differences(pairs)(flags)
        found.append((flags.tolist(), expected))
    return found


@pytest.mark.timeout(120)
def test_groups_with_an_edit_are_found_and_no_others() -> None:
    pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    # It interprets what is defined while the variable is set: in a process of its own.
    code = "from tests.primitives.test_differences import differing\nfor pair in differing(30): assert pair[0] == pair[1], pair"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("aligned", [True, False])
def test_it_compiles_and_fits(target: tuple[str, str | int, int], aligned: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.differences import _differences

    block, warps, stages = form(1, 6, IN_FLIGHT if aligned else IN_FLIGHT // 2)
    source = ASTSource(
        fn=_differences,
        signature={"table": "*i64", "chunks": "i32", "found": "*u8"}
        | dict.fromkeys(("OWN", "PUBLISHED", "ALIGNED", "STAGES", "BLOCK"), "constexpr"),
        constexprs={(3,): triton.language.float32, (4,): triton.language.bfloat16, (5,): aligned, (6,): stages, (7,): block},
        attrs={(place,): [["tt.divisibility", 16]] for place in (0, 2)},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000
    if target[0] == "hip":
        assert compiled.metadata.shared <= 64 << 10  # MI300X has no more
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]) == ["0"]
    else:
        assert compiled.metadata.shared <= IN_FLIGHT + (20 << 10)
        assert not aligned or "cp.async" in compiled.asm["ptx"]  # really a pipeline
