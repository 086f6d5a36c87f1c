"""Small samples and caches for the tests of the data part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primus_odc.data.cache import TokenCache, open_or_build
from primus_odc.data.samples import Sample


def make_sample(sample_id: str, tokens: Sequence[int], targets: Sequence[int]) -> Sample:
    """A sample with the given tokens, of which the positions ``targets`` count."""
    mask = np.zeros(len(tokens), dtype=np.bool_)
    mask[list(targets)] = True
    return Sample(sample_id=sample_id, tokens=np.array(tokens, dtype=np.int32), target_mask=mask)


THREE = (make_sample("a", [5, 6, 7], [1, 2]), make_sample("b", [9], []), make_sample("c", [1, 2, 3, 4, 8], [3, 4]))
"""Three samples with 2, 0 and 2 targets."""


def make_cache(directory: Path, samples: Sequence[Sample] = THREE, timeout_s: float = 5.0) -> TokenCache:
    """A cache of ``samples`` below ``directory``."""
    return open_or_build(directory, {"source": "helper", "count": len(samples)}, samples, "helper", timeout_s)
