"""T13: frozen parameters, LoRA only, modules that a rank never uses, other modules in every microbatch.

Right: what got no gradient in the whole minibatch is zero, what some rank used is exact on every rank, frozen parameters have no gradient
and do not change, and every gradient lands on its own parameter. References are one process in fp64; those of LoRA follow from the
gradient G of the effective weight W + s B A: dA = s B^T G, dB = s G A^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import primus_odc
from primus_odc.data.packing import pack_microbatch
from primus_odc.data.samples import Sample
from primus_odc.megatron.microbatch import Microbatch
from primus_odc.megatron.model import PackedGPT
from tests.cases.gpt_ranks import MODES, TOLERANCE, VERIFIED, Gradients, make_samples, shard, worst_error
from tests.fsdp.checks import failures, run_checks
from tests.megatron.gpt_cases import CPU, QWEN2, make_model
from tests.reference_gpt import reference_loss_and_gradients
from tests.workers import run_workers

SAMPLES = make_samples((9, 4, 17, 6))
ASSIGNMENT = ([0, 1, 2], [3])
"""[rank] -> samples, one microbatch each: 3 and 1."""
TARGETS = sum(int(s.target_mask.sum()) for s in SAMPLES)
RANK, SCALE = 3, 0.5


class _Adapted(nn.Module):
    """A Megatron linear layer with LoRA adapters, of which one is in use: y = W x + s B A x."""

    def __init__(self, base: nn.Module, adapters: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        out, into = base.get_parameter("weight").shape
        self.a = nn.ParameterList(torch.randn(RANK, into, generator=generator) * 0.1 for _ in range(adapters))
        # Small, so that fp32 itself stays below the tolerance on every BLAS: gradients of an adapter are sums of few, cancelling terms.
        self.b = nn.ParameterList(torch.randn(out, RANK, generator=generator) * 0.05 for _ in range(adapters))
        self.in_use = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = self.base(x)
        return y + SCALE * (x @ self.a[self.in_use].t() @ self.b[self.in_use].t()), bias


_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def _lora(adapters: int = 1) -> PackedGPT:
    """The GPT with everything frozen but adapters on every linear layer of every block."""
    model = make_model(QWEN2).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for layer in model.decoder.layers:
        for path in _LINEARS:
            parent, _, name = path.rpartition(".")
            owner = layer.get_submodule(parent)
            setattr(owner, name, _Adapted(getattr(owner, name), adapters, generator))
    return model


def _lora_gradients(model: PackedGPT, adapter_of: Sequence[int]) -> Gradients:
    """fp64 gradients of all adapters; sample i is run with adapter ``adapter_of[i]``."""
    state = {name: p.detach().double() for name, p in model.named_parameters()}
    found = {name: torch.zeros_like(p) for name, p in state.items() if ".a." in name or ".b." in name}
    for number in set(adapter_of):
        samples = [s for s, used in zip(SAMPLES, adapter_of, strict=True) if used == number]
        weights = {name.replace(".base.", "."): p for name, p in state.items() if name not in found}
        linears = [name.removesuffix(f".a.{number}") for name in found if name.endswith(f".a.{number}")]
        for linear in linears:
            weights[f"{linear}.weight"] = (
                weights[f"{linear}.weight"] + SCALE * state[f"{linear}.b.{number}"] @ state[f"{linear}.a.{number}"]
            )
        effective = _reference(weights, samples)
        for linear in linears:
            g = effective[f"{linear}.weight"]
            found[f"{linear}.a.{number}"] = SCALE * state[f"{linear}.b.{number}"].T @ g
            found[f"{linear}.b.{number}"] = SCALE * g @ state[f"{linear}.a.{number}"].T
    return found


def _reference(weights: Mapping[str, Any], samples: Sequence[Sample], params: Mapping[str, Any] = QWEN2) -> Gradients:
    _, gradients, _ = reference_loss_and_gradients(weights, params, samples)
    return {name: g / TARGETS for name, g in gradients.items()}


def _settled(model: PackedGPT, before: Callable[[int], None] = lambda i: None) -> Iterator[None]:
    """Run the minibatch twice in several modes, calling ``before(sample)`` before each microbatch; yields after every settle."""
    for mode in (*MODES[:2], VERIFIED):
        engine = primus_odc.attach(model, **mode)
        for _ in range(2):
            own = ASSIGNMENT[dist.get_rank()]
            model.zero_grad()
            engine.begin_minibatch(len(own))
            for i in own:
                before(i)
                (model(Microbatch.of(pack_microbatch([SAMPLES[i]]), CPU)) / TARGETS).backward()
            engine.settle()
            yield
        engine.detach()


def _frozen(is_frozen: Callable[[str], bool]) -> None:
    model = make_model(QWEN2)
    expected = _reference(model.state_dict(), SAMPLES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    expected = {name: g for name, g in expected.items() if not is_frozen(name)}
    for _ in _settled(shard(model)):
        assert worst_error(model, expected) <= TOLERANCE
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def frozen_norms_and_biases() -> None:
    _frozen(lambda name: "layernorm" in name or name.endswith("bias"))


def frozen_embedding_and_first_block() -> None:
    _frozen(lambda name: name.startswith(("embedding.", "decoder.layers.0.")))


def everything_frozen_but_the_last_block() -> None:
    _frozen(lambda name: not name.startswith("decoder.layers.1."))


def everything_frozen_but_one_norm() -> None:
    _frozen(lambda name: name != "decoder.layers.0.pre_mlp_layernorm.weight")


def lora_only() -> None:
    model = _lora()
    expected = _lora_gradients(model, [0] * len(SAMPLES))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard(model)
    for _ in _settled(model):
        assert worst_error(model, expected) <= TOLERANCE
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    for name, parameter in model.named_parameters():
        unchanged = torch.equal(parameter.full_tensor(), before[name])
        assert unchanged != parameter.requires_grad, name


def another_adapter_in_every_microbatch() -> None:
    """Rank 0 uses adapters 0, 1, 0, rank 1 only adapter 1, and nobody adapter 2."""
    model = _lora(adapters=3)
    adapter_of = [0, 1, 0, 1]
    expected = _lora_gradients(model, adapter_of)
    adapted = [m for m in model.modules() if isinstance(m, _Adapted)]

    def choose(sample: int) -> None:
        for module in adapted:
            module.in_use = adapter_of[sample]

    shard(model)
    for _ in _settled(model, choose):
        assert worst_error(model, expected) <= TOLERANCE
        for module in adapted:
            for parameter in (module.a[2], module.b[2]):
                assert float(parameter.grad.full_tensor().abs().max()) == 0.0


class _Chosen(nn.ModuleList):
    """The blocks of a decoder, of which only the chosen ones run."""

    chosen: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self[i] for i in self.chosen])


def _reduced(weights: Mapping[str, torch.Tensor], blocks: Sequence[int]) -> dict[str, torch.Tensor]:
    """The weights of a GPT that has only ``blocks``, renumbered."""
    found = {name: w for name, w in weights.items() if not name.startswith("decoder.layers.")}
    for new, old in enumerate(blocks):
        found |= {n.replace(f"layers.{old}.", f"layers.{new}."): w for n, w in weights.items() if n.startswith(f"decoder.layers.{old}.")}
    return found


def _skipping(blocks_of: Sequence[tuple[int, ...]]) -> None:
    """Sample i runs through the blocks ``blocks_of[i]`` only; a block that is left out is never called, so never gathered."""
    model = make_model(QWEN2)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in weights.items()}
    for sample, blocks in zip(SAMPLES, blocks_of, strict=True):
        part = _reference(_reduced(weights, blocks), [sample], {**QWEN2, "num_layers": len(blocks)})
        for name, g in part.items():
            old = name
            if name.startswith("decoder.layers."):
                new = int(name.split(".")[2])
                old = name.replace(f"layers.{new}.", f"layers.{blocks[new]}.")
            expected[old] += g
    layers = _Chosen(list(model.decoder.layers))
    layers.chosen = (0, 1)
    model.decoder.layers = layers
    shard(model)

    def choose(sample: int) -> None:
        layers.chosen = blocks_of[sample]

    for _ in _settled(model, choose):
        assert worst_error(model, expected) <= TOLERANCE


def a_block_one_rank_never_uses() -> None:
    _skipping([(0, 1), (0, 1), (0, 1), (0,)])


def other_blocks_in_every_microbatch() -> None:
    _skipping([(0,), (1,), (), (1, 0)])


def a_block_nobody_uses() -> None:
    _skipping([(1,), (1,), (1,), (1,)])


CHECKS = {
    f.__name__: f
    for f in (
        frozen_norms_and_biases,
        frozen_embedding_and_first_block,
        everything_frozen_but_the_last_block,
        everything_frozen_but_one_norm,
        lora_only,
        another_adapter_in_every_microbatch,
        a_block_one_rank_never_uses,
        other_blocks_in_every_microbatch,
        a_block_nobody_uses,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, CHECKS, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHECKS)
def test_parts(outcomes: list[dict[str, str]], name: str) -> None:
    assert failures(outcomes, name) == ""
