"""The device kernels compile for every architecture it is meant for, on a machine without any of them (its values: tests/gpu)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_odc.primitives.forms import IN_FLIGHT, form

TARGETS = [("hip", "gfx942", 64), ("hip", "gfx950", 64), ("cuda", 90, 32)]


KINDS = {"wide": (True, False, 4), "narrow": (False, True, 2), "mixed": (True, True, 6)}
"""Whether there are sources of the sum's dtype, and narrow ones; bytes to be read for a number of one of them."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sources", "aligned"), [(2, True), (4, True), (8, True), (8, False), (16, True)])
def test_the_pull_sum_compiles_and_fits(target: tuple[str, str | int, int], kind: str, sources: int, aligned: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _pull_sum

    wide, narrow, nbytes = KINDS[kind]
    block, warps, stages = form(sources, nbytes, IN_FLIGHT if aligned else IN_FLIGHT // 2)
    signature = {"total": "*fp32", "table": "*i64", "present": "i64", "narrow": "i64", "shift": "i64", "numel": "i64"}
    source = ASTSource(
        fn=_pull_sum,
        signature=signature | dict.fromkeys(("SOURCES", "ALIGNED", "WIDE", "NARROW", "STAGES", "BLOCK"), "constexpr"),
        constexprs={
            (6,): sources,
            (7,): aligned,
            (8,): wide,
            (9,): triton.language.bfloat16 if narrow else None,
            (10,): stages,
            (11,): block,
        },
        attrs={(place,): [["tt.divisibility", 16]] for place in (0, 1, 5)},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000
    if target[0] == "hip":
        assert compiled.metadata.shared <= 64 << 10  # MI300X has no more
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]) == ["0"]
    else:
        assert compiled.metadata.shared <= IN_FLIGHT + (20 << 10)
        assert not aligned or stages == 1 or "cp.async" in compiled.asm["ptx"]  # really a pipeline


@given(st.integers(1, 63), st.sampled_from([2, 4, 6, 8, 10]), st.integers(32 << 10, 256 << 10))
def test_a_sum_has_no_more_under_way_than_there_is_room_for(sources: int, nbytes: int, room: int) -> None:
    block, warps, stages = form(sources, nbytes, room)
    assert block in (1024, 2048, 4096, 8192, 16384)
    assert 4 <= warps <= 16 and block % (32 * warps) == 0
    assert 1 <= stages <= 3 and (stages - 1) * sources * block * nbytes <= min(room, IN_FLIGHT)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "added"])
def test_the_accumulation_compiles(target: tuple[str, str | int, int], fresh: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _accumulate

    block, warps, stages = form(1, 2 if fresh else 6, IN_FLIGHT)
    signature = {"target": "*fp32", "source": "*bf16", "rows": "i32", "columns": "i32", "target_stride": "i64", "source_stride": "i64"}
    source = ASTSource(
        fn=_accumulate,
        signature=signature | dict.fromkeys(("FRESH", "STAGES", "BLOCK"), "constexpr"),
        constexprs={(6,): fresh, (7,): stages, (8,): block},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_several_pull_sums_compile(target: tuple[str, str | int, int]) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _pull_sums

    block, warps, _ = form(8, 6, IN_FLIGHT)
    source = ASTSource(
        fn=_pull_sums,
        signature={"kind": "*fp32", "table": "*i64", "sizes": "*i64", "present": "i64", "narrow": "i64"}
        | dict.fromkeys(("GROUPS", "SOURCES", "WIDE", "NARROW", "BLOCK"), "constexpr"),
        constexprs={(5,): 5, (6,): 8, (7,): True, (8,): triton.language.float16, (9,): block},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000
