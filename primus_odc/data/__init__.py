"""From documents to packed microbatches: sources, tokenizers, a token cache, a resumable stream. numpy only, no torch."""

from __future__ import annotations

from primus_odc.data.build import build_dataset, build_stream, build_tokenizer
from primus_odc.data.dataset import TokenDataset
from primus_odc.data.packing import PackedMicrobatch, pack_microbatch
from primus_odc.data.samples import Sample
from primus_odc.data.stream import MinibatchStream
from primus_odc.data.tokenizers import Tokenizer

__all__ = [
    "MinibatchStream",
    "PackedMicrobatch",
    "Sample",
    "TokenDataset",
    "Tokenizer",
    "build_dataset",
    "build_stream",
    "build_tokenizer",
    "pack_microbatch",
]
