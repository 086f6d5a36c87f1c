from __future__ import annotations

import pytest
import torch

from primus_odc.bench.optimizer import DTensorAdamW, LocalAdamW, optimizer_bytes


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


@pytest.mark.parametrize("kind", [LocalAdamW, DTensorAdamW])
def test_steps_gather_moments_and_leave_the_weights(kind: type[LocalAdamW] | type[DTensorAdamW]) -> None:
    own, before = parameters(), parameters()
    optimizer = kind(own)
    for _ in range(2):
        for parameter in own:
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in own)
    assert all(torch.equal(parameter, start) for parameter, start in zip(own, before, strict=True))
    inner = optimizer._optimizer
    assert inner is not None
    moments = [state["exp_avg"] for state in inner.state.values()]
    # Two steps of the same gradient g: 0.1 g, then 0.9 * 0.1 g + 0.1 g.
    assert all(torch.allclose(moment, torch.full_like(moment, 0.19 * 2.0)) for moment in moments) and len(moments) == 2
    steps = sum(state["step"].nbytes for state in inner.state.values())
    assert optimizer.state_bytes() == optimizer_bytes(inner) == 2 * 4 * 17 + steps
