"""What a benchmark says when its models do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from primus_odc.bench.train import saying_what_does_not_fit
from primus_odc.errors import OdcError


def test_what_does_not_fit_is_named_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    said = r"rank 3: 4 samples a rank, ideal does not fit .*892 MiB.* Name fewer --arms .*--share-model"
    with pytest.raises(OdcError, match=said), saying_what_does_not_fit("4 samples a rank, ideal"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 892 MiB")
    with pytest.raises(ValueError, match="another"), saying_what_does_not_fit("4 samples a rank, ideal"):
        raise ValueError("another")
