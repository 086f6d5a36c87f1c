"""The device kernels compile for every architecture it is meant for, on a machine without any of them (its values: tests/gpu)."""

from __future__ import annotations

import pytest

TARGETS = [("hip", "gfx942", 64), ("hip", "gfx950", 64), ("cuda", 90, 32)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_the_pull_sum_compiles(target: tuple[str, str | int, int], aligned: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _pull_sum

    signature = {"total": "*fp32", "table": "*i64", "present": "i64", "narrow": "i64", "shift": "i64", "numel": "i64"}
    source = ASTSource(
        fn=_pull_sum,
        signature=signature | dict.fromkeys(("SOURCES", "ALIGNED", "NARROW", "BLOCK"), "constexpr"),
        constexprs={(6,): 8, (7,): aligned, (8,): triton.language.bfloat16, (9,): 4096},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "added"])
def test_the_accumulation_compiles(target: tuple[str, str | int, int], fresh: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _accumulate

    signature = {"target": "*fp32", "source": "*bf16", "rows": "i32", "columns": "i32", "target_stride": "i64", "source_stride": "i64"}
    source = ASTSource(
        fn=_accumulate,
        signature=signature | dict.fromkeys(("FRESH", "BLOCK"), "constexpr"),
        constexprs={(6,): fresh, (7,): 4096},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_several_pull_sums_compile(target: tuple[str, str | int, int]) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton (extra 'kernels')")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from primus_odc.primitives.kernels import _pull_sums

    source = ASTSource(
        fn=_pull_sums,
        signature={"kind": "*fp32", "table": "*i64", "sizes": "*i64", "present": "i64", "narrow": "i64"}
        | dict.fromkeys(("GROUPS", "SOURCES", "NARROW", "BLOCK"), "constexpr"),
        constexprs={(5,): 5, (6,): 8, (7,): triton.language.float16, (8,): 4096},
    )
    compiled = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    assert len(compiled.asm["hsaco" if target[0] == "hip" else "cubin"]) > 1000
