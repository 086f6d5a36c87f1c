"""megatron-core's GPTModel for packed samples, the same on CPU and CUDA.

Embedding, transformer blocks and norms are megatron-core's local ones. Three modules are put in by its own means: the core attention and
the recomputed block through a ModuleSpec, the rotary embedding and the head (which is also the loss) by replacing attributes of the built
model. Nothing in torch or Megatron is patched. One call of the model is one microbatch and returns its loss sum, so the head is used inside
the root module's forward, as FSDP2 needs it, whether or not it is a unit of its own.

The initial weights of `build_gpt` are drawn on the CPU from `seed` and nothing else: every rank, arm and number of ranks starts with the
same model.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from primus_odc.errors import ConfigError, ProtocolError
from primus_odc.megatron.attention import PackedAttention, PackedRotaryEmbedding
from primus_odc.megatron.gpt_config import GptConfig, gpt_config
from primus_odc.megatron.loss import CrossEntropyHead
from primus_odc.megatron.microbatch import Microbatch

_INTERFACE = "GLOO_SOCKET_IFNAME"


class RecomputedLayer(TransformerLayer):
    """A transformer layer that keeps only its input and runs again in backward.

    The recomputation lies inside the layer, so inside its FSDP2 unit: it uses the parameters gathered for backward and gathers nothing
    more. Megatron's own recomputation lies outside the layer and saves the state of a CUDA generator, which a CPU does not have.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        # No generator state to save: there is no dropout.
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _block_spec(config: GptConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with packed attention; torch's norms also where Apex or TransformerEngine are installed."""

    def layer_spec(layer: type[TransformerLayer]) -> ModuleSpec:
        spec = get_gpt_layer_local_spec(normalization=config.transformer.normalization)
        spec.module = layer
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = functools.partial(PackedAttention, recompute=config.recompute_core_attention)
        return spec

    plain = config.transformer.num_layers - config.recomputed_layers
    layers = [layer_spec(RecomputedLayer)] * config.recomputed_layers + [layer_spec(TransformerLayer)] * plain
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


class PackedGPT(GPTModel):
    """GPTModel whose forward takes one packed microbatch and returns its loss sum."""

    output_layer: CrossEntropyHead
    """The head, which is the loss too."""

    def __init__(self, config: GptConfig, chunk_tokens: int | None = None) -> None:
        """Build the model on the CPU, in fp32. `chunk_tokens`: see CrossEntropyHead."""
        super().__init__(
            config=config.transformer,
            transformer_layer_spec=_block_spec(config),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_positions,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            seq_len_interpolation_factor=config.rotary_interpolation,
        )
        self.gpt_config = config
        self.output_layer = CrossEntropyHead(self.output_layer.weight, chunk_tokens)

    def place_rotary_embedding(self, device: torch.device) -> None:
        """Put the rotary angles on `device`; they are no parameters, so `.to` does not move them."""
        if self.gpt_config.position_embedding_type == "rope":
            self.rotary_pos_emb = PackedRotaryEmbedding(
                device=device,
                kv_channels=self.config.kv_channels,
                rotary_percent=self.gpt_config.rotary_percent,
                seq_len_interpolation_factor=self.gpt_config.rotary_interpolation,
                rotary_base=self.gpt_config.rotary_base,
                cp_group=self.pg_collection.cp,
            )

    def forward(self, microbatch: Microbatch) -> torch.Tensor:
        """Cross entropy summed over the microbatch's targets, a scalar: fp32, or fp64 for fp64 parameters.

        Divide it by the number of targets of the whole minibatch over all ranks before backward.
        """
        angles = None
        if self.position_embedding_type == "rope":
            angles = self.rotary_pos_emb(microbatch.packed.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=self.embedding(input_ids=microbatch.tokens, position_ids=microbatch.position_ids),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=microbatch.packed,
        )
        loss: torch.Tensor = self.output_layer(hidden, microbatch.target_index, microbatch.targets)
        return loss


@contextmanager
def alone_unless_initialised() -> Iterator[None]:
    """A process group of this process alone, at the loopback interface, where there is none: to build a model that nobody trains. No host
    name is looked up, nobody is waited for, and it is gone at the end."""
    if dist.is_initialized():
        yield
        return
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = "lo"
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        if before is None:
            os.environ.pop(_INTERFACE, None)
        else:
            os.environ[_INTERFACE] = before


def initialize_parallel_state() -> None:
    """Tell megatron-core that every rank is a data-parallel one. All ranks call it, after torch.distributed is initialised.

    Raises:
        ProtocolError: torch.distributed is not initialised.
        ConfigError: megatron-core is already initialised with another split.
    """
    if not dist.is_initialized():
        raise ProtocolError("initialise torch.distributed before building the model; megatron-core asks it for its process groups")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    data_parallel, world = parallel_state.get_data_parallel_world_size(), dist.get_world_size()
    if data_parallel != world:
        raise ConfigError([f"megatron-core is initialised with {data_parallel} data-parallel ranks of {world}; all of them must be"])


def build_gpt(
    params: Mapping[str, Any],
    vocab_size: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
) -> PackedGPT:
    """Build a GPT from the Megatron keys of a trainer module. All ranks call it, after torch.distributed is initialised.

    Args:
        params: flat Megatron keys; an absent one has Megatron's default.
        vocab_size: rows of embedding and head, with whatever padding the caller wants.
        device: where parameters and rotary angles lie in the end; the weights are drawn on the CPU.
        dtype: of the parameters: fp32 for training, also in bf16 (FSDP2 casts while gathering); fp64 for references.
        chunk_tokens: how many tokens have logits at once; None: :func:`primus_odc.megatron.loss.chunk_size`.

    Raises:
        ConfigError: all keys that are wrong or ask for something this model cannot do.
        ProtocolError: torch.distributed is not initialised.
    """
    config = gpt_config(params, vocab_size)
    initialize_parallel_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # the CPU's alone: torch.manual_seed would reseed every GPU too
        model = PackedGPT(config, chunk_tokens)
    model.to(device=device, dtype=dtype)
    model.place_rotary_embedding(device)
    return model


def build_gpt_without_weights(params: Mapping[str, Any], vocab_size: int) -> PackedGPT:
    """A GPT on the meta device, fp32, to be sharded and then given weights by :func:`draw_weights`. Arguments and errors: `build_gpt`."""
    config = gpt_config(params, vocab_size)
    initialize_parallel_state()
    with torch.device("meta"):
        return PackedGPT(config)


@torch.no_grad()
def draw_weights(model: PackedGPT, device: torch.device, seed: int, rank: int = 0) -> None:
    """Put the parameters of a model without weights on `device` and draw there what `rank` holds of each.

    Same distribution as `build_gpt`, other numbers: those depend on `seed`, the rank and how the model is sharded, so that nothing is
    drawn that is not kept. For measurements, where one model is made quickly; training starts from `build_gpt`.
    """
    model.to_empty(device=device)
    model.place_rotary_embedding(device)
    generator = torch.Generator(device=device).manual_seed(seed * 65536 + rank)
    config = model.gpt_config.transformer
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = config.init_method_std / (math.sqrt(2.0 * config.num_layers) if into_residual else 1.0)
            local.normal_(0.0, std, generator=generator)
