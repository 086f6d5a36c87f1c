"""A process group of one rank, which megatron-core needs to build a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
