"""What the engine refuses, and that a refusal on one rank ends all of them with its reason."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import primus_odc
from primus_odc.errors import ConfigError, OdcError, PeerError, ProtocolError, UnsupportedModelError
from primus_odc.fsdp.engine import Engine
from tests.fsdp.checks import failures, run_checks
from tests.fsdp.models import Tiny, loss_of, microbatch, shard, tiny_model
from tests.workers import run_workers


def _refused(action: Callable[[], object], kind: type[OdcError] | tuple[type[OdcError], ...], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        action()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def _attached(**options: object) -> tuple[Tiny, Engine]:
    model = shard(tiny_model())
    return model, primus_odc.attach(model, **options)


def _backward(model: nn.Module) -> None:
    x, y = microbatch(0, dist.get_rank(), 0)
    loss_of(model, x, y, 1).backward()


def wrong_options() -> None:
    model = shard(tiny_model())
    _refused(lambda: primus_odc.attach(model, transport="rocshm"), ConfigError, "rocshm", "host")
    _refused(lambda: primus_odc.attach(model, accumulat="local"), ConfigError, "accumulat", "accumulate")
    _refused(lambda: primus_odc.attach(model, transport="symm_mem"), ConfigError, "symm_mem", "odc.transport")
    _refused(lambda: primus_odc.attach(model, deterministic=True, accumulate="owner"), ConfigError, "deterministic", "owner")


def models_that_cannot_be_served() -> None:
    _refused(lambda: primus_odc.attach(tiny_model()), UnsupportedModelError, "fully_shard")
    blocks_only = tiny_model()
    fully_shard(blocks_only.blocks[0])
    _refused(lambda: primus_odc.attach(blocks_only), UnsupportedModelError, "root")
    with torch.device("meta"):
        meta = Tiny()
    shard(meta)
    _refused(lambda: primus_odc.attach(meta), UnsupportedModelError, "meta device", "embed.weight")
    ignoring = tiny_model()
    fully_shard(ignoring, ignored_params=set(ignoring.head.parameters()))
    _refused(lambda: primus_odc.attach(ignoring), UnsupportedModelError, "head.weight", "head.bias", "ignored_params")
    tensor_parallel = tiny_model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    fully_shard(tensor_parallel.head, mesh=mesh["a"])
    fully_shard(tensor_parallel, mesh=mesh["b"])
    _refused(lambda: primus_odc.attach(tensor_parallel), UnsupportedModelError, "2 different device meshes")


def a_refused_model_trains_natively_as_before() -> None:
    model = shard(tiny_model())
    if dist.get_rank() == 1:
        model.blocks[0].up.weight.requires_grad_(False)  # ranks disagree
    _refused(lambda: primus_odc.attach(model), UnsupportedModelError, "requires_grad")
    model.blocks[0].up.weight.requires_grad_(True)
    _backward(model)
    assert all(p.grad is not None for p in model.parameters())


def attached_twice() -> None:
    model, engine = _attached()
    _refused(lambda: primus_odc.attach(model), ProtocolError, "detach()")
    _refused(lambda: primus_odc.attach(model.blocks[0]), ProtocolError, "one that it is part of")
    engine.detach()
    part = primus_odc.attach(model.blocks[0])
    _refused(lambda: primus_odc.attach(model), ProtocolError, "a part of it")
    part.detach()
    primus_odc.attach(model).detach()


def wrong_order(call: Callable[[Tiny, Engine], object], *parts: str) -> Callable[[], None]:
    def check() -> None:
        model, engine = _attached(parameters="reshard")
        dist.barrier()  # an error on one rank must not end another's attach()
        # All ranks make the mistake; a later one may first see that an earlier one has failed, with that one's reason.
        _refused(lambda: call(model, engine), (ProtocolError, PeerError), *parts)

    return check


def _settle_twice(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(0)
    engine.settle()
    engine.settle()


def _forward_after_settle(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(0)
    engine.settle()
    dist.barrier()
    model(torch.randn(1, 5))


def _one_microbatch_too_many(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(1)
    _backward(model)
    _backward(model)


def _one_microbatch_too_few(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(2)
    _backward(model)
    engine.settle()


def _backward_without_begin(model: Tiny, engine: Engine) -> None:
    _backward(model)


def _begin_twice(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(1)
    engine.begin_minibatch(1)


def _publish_inside(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(1)
    engine.publish()


def _assign(model: Tiny) -> None:
    model.blocks[1].down.bias.grad = torch.ones_like(model.blocks[1].down.bias)


def _assign_before_backward(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(1)
    _assign(model)
    _backward(model)


def _assign_between_two(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(2)
    _backward(model)
    _assign(model)
    _backward(model)


def _assign_before_settle(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(dist.get_rank())  # on rank 0 no backward would notice
    if dist.get_rank():
        _backward(model)
    _assign(model)
    engine.settle()


def _assign_to_a_new_parameter(model: Tiny, engine: Engine) -> None:
    model.load_state_dict(shard(tiny_model(1)).state_dict(), assign=True)
    engine.publish()
    _assign_between_two(model, engine)


def _edit_without_publish(model: Tiny, engine: Engine) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    engine.begin_minibatch(1)
    _backward(model)


def _edit_after_evaluation(model: Tiny, engine: Engine) -> None:
    """The evaluation saw the published values; what counts is what the minibatch would use."""
    with torch.no_grad():
        model(torch.ones(2, 5))
    model.reshard()  # type: ignore[operator]
    _edit_without_publish(model, engine)


def an_edit_on_a_rank_without_microbatches() -> None:
    """Nothing is gathered where the edit was made, and everything that the others compute is wrong."""
    model, engine = _attached()
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    engine.begin_minibatch(dist.get_rank())
    dist.barrier()

    def minibatch() -> None:
        if dist.get_rank():
            _backward(model)
        engine.settle()

    _refused(minibatch, (ProtocolError, PeerError), "changed after they were published", "publish()")


def _clip_before_settle(model: Tiny, engine: Engine) -> None:
    engine.begin_minibatch(1)
    _backward(model)
    engine.clip_grad_norm_(1.0)


def _use_after_detach(model: Tiny, engine: Engine) -> None:
    engine.detach()
    engine.begin_minibatch(1)


def _requires_grad_changed_after_attach() -> None:
    """Frozen then, a parameter would go on moving by momentum and weight decay of the zeros it is given."""
    for trainable in (True, False):
        model = shard(tiny_model())
        model.head.weight.requires_grad_(trainable)
        engine = primus_odc.attach(model)
        model.head.weight.requires_grad_(not trainable)
        dist.barrier()
        _refused(partial(engine.begin_minibatch, 1), (ProtocolError, PeerError), "head.weight", "attach()")


def an_error_on_one_rank_ends_the_others_with_its_reason() -> None:
    model, engine = _attached()
    engine.begin_minibatch(1)
    _backward(model)
    dist.barrier()
    if dist.get_rank() == 0:
        _refused(lambda: _backward(model), ProtocolError, "announced 1")
    else:
        _refused(engine.settle, PeerError, "rank 0 aborted", "announced 1")
        _refused(engine.publish, PeerError, "this rank failed before")


def an_exception_that_is_caught_inside_backward() -> None:
    """The rank that had it lives on and calls nothing; it keeps the exception, as a debugger would."""
    for where in (0, 1):
        model, engine = _attached(timeout_s=60)
        engine.begin_minibatch(1)
        if dist.get_rank() == 0:
            _backward(model)  # before the other fails, or this would hear of it
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == 1:

            def broken(*_: object) -> None:
                raise ValueError("broken on purpose")

            handle = model.blocks[where].register_full_backward_pre_hook(broken)
            with pytest.raises(ValueError, match="broken on purpose"):
                _backward(model)
            handle.remove()
        else:
            _refused(engine.settle, PeerError, "rank 1 aborted", "an exception was raised inside the backward pass of microbatch 1")
        dist.barrier()
        assert time.monotonic() - start < 30
        if dist.get_rank() == 1:
            _refused(engine.settle, PeerError, "this rank failed before", "inside the backward pass")


def _publish_twice(engine: Engine) -> None:
    engine.publish()  # that of begin_minibatch()
    engine.publish()


def calls_of_one_rank_alone() -> None:
    """Told at once on both ranks, long before odc.timeout_s, whichever of them came first."""
    calls: dict[str, Callable[[Engine], object]] = {
        "publish()": _publish_twice,
        "detach()": lambda e: e.detach(),
        "a gradient norm": lambda e: e.grad_norm(),
    }
    for first, (name, call) in itertools.product((0, 1), calls.items()):
        model, engine = _attached(timeout_s=60)
        engine.begin_minibatch(0)
        engine.settle()

        def minibatch(model: Tiny = model, engine: Engine = engine) -> None:
            engine.begin_minibatch(1)
            _backward(model)
            engine.settle()

        start = time.monotonic()
        if dist.get_rank() != first:
            time.sleep(0.1)
        said = f"rank 1 began minibatch 2 without {name}"
        if dist.get_rank() == 0:
            _refused(functools.partial(call, engine), ProtocolError, said)
        else:
            _refused(minibatch, PeerError, "rank 0 aborted", said)
        assert time.monotonic() - start < 30
        dist.barrier()


def norms_of_different_kinds() -> None:
    """Told on every rank, with who differs; grad_norm() beside clipping is one of them."""
    for mine, other in (
        (lambda e: e.grad_norm(2.0), lambda e: e.grad_norm("inf")),
        (lambda e: e.clip_grad_norm_(1.0, 2.0), lambda e: e.clip_grad_norm_(1.0, 1.0)),
        (lambda e: e.clip_grad_norm_(1.0), lambda e: e.clip_grad_norm_(0.5)),
        (lambda e: e.clip_grad_norm_(1.0), lambda e: e.grad_norm()),
    ):
        model, engine = _attached(timeout_s=60)
        engine.begin_minibatch(1)
        _backward(model)
        engine.settle()
        call: Callable[[Engine], object] = mine if dist.get_rank() == 0 else other
        said = ("and rank 1 took another one", "norm_type and max_norm") if dist.get_rank() == 0 else ("and rank 0 took another one",)
        with pytest.raises((ProtocolError, PeerError)) as caught:  # who comes second may hear it from the first
            call(engine)
        assert any(words in str(caught.value) for words in (*said, "rank 0 aborted", "rank 1 aborted")), str(caught.value)
        dist.barrier()
    model, engine = _attached()
    engine.begin_minibatch(1)
    _backward(model)
    engine.settle()
    assert engine.grad_norm("inf") == engine.grad_norm(float("inf")) == float(engine.clip_grad_norm_(float("inf"), "inf"))
    engine.detach()


ASSIGNED = ("blocks.1.down.bias was assigned inside a minibatch", "before begin_minibatch()")
ON_TWO: dict[str, Callable[[], None]] = {
    "norms_of_different_kinds": norms_of_different_kinds,
    "wrong_options": wrong_options,
    "models_that_cannot_be_served": models_that_cannot_be_served,
    "a_refused_model_trains_natively_as_before": a_refused_model_trains_natively_as_before,
    "attached_twice": attached_twice,
    "forward_after_settle": wrong_order(_forward_after_settle, "gather of group", "publish()"),
    "edit_without_publish": wrong_order(_edit_without_publish, "changed after they were published", "publish()"),
    "edit_after_evaluation": wrong_order(_edit_after_evaluation, "changed after they were published", "publish()"),
    "an_edit_on_a_rank_without_microbatches": an_edit_on_a_rank_without_microbatches,
    "assign_before_backward": wrong_order(_assign_before_backward, *ASSIGNED),
    "assign_between_two": wrong_order(_assign_between_two, *ASSIGNED),
    "assign_before_settle": wrong_order(_assign_before_settle, *ASSIGNED),
    "assign_to_a_new_parameter": wrong_order(_assign_to_a_new_parameter, *ASSIGNED),
    "requires_grad_changed_after_attach": _requires_grad_changed_after_attach,
    "an_error_on_one_rank_ends_the_others_with_its_reason": an_error_on_one_rank_ends_the_others_with_its_reason,
    "an_exception_that_is_caught_inside_backward": an_exception_that_is_caught_inside_backward,
    "calls_of_one_rank_alone": calls_of_one_rank_alone,
}
ON_ONE: dict[str, Callable[[], None]] = {
    "settle_twice": wrong_order(_settle_twice, "settle", "begin_minibatch()"),
    "one_microbatch_too_many": wrong_order(_one_microbatch_too_many, "announced 1", "pass None"),
    "one_microbatch_too_few": wrong_order(_one_microbatch_too_few, "after 1 microbatches", "announced 2"),
    "backward_without_begin": wrong_order(_backward_without_begin, "reduction of group", "begin_minibatch()"),
    "begin_twice": wrong_order(_begin_twice, "settle()"),
    "publish_inside": wrong_order(_publish_inside, "publish", "settle()"),
    "assign_before_backward": wrong_order(_assign_before_backward, *ASSIGNED),
    "assign_before_settle": wrong_order(_assign_before_settle, *ASSIGNED),
    "clip_before_settle": wrong_order(_clip_before_settle, "between settle()"),
    "negative_count": wrong_order(lambda m, e: e.begin_minibatch(-1), "-1"),
    "last_microbatch_outside": wrong_order(lambda m, e: e.last_microbatch(), "begin_minibatch()"),
    "use_after_detach": wrong_order(_use_after_detach, "detached"),
}


def _checks(rank: int, world_size: int) -> dict[str, str]:
    return run_checks(rank, world_size, ON_TWO if world_size == 2 else ON_ONE)


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, str]]:
    return run_workers(_checks, 2, timeout_s=100)


@pytest.fixture(scope="module")
def on_one() -> list[dict[str, str]]:
    return run_workers(_checks, 1, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ON_TWO)
def test_refusals(on_two: list[dict[str, str]], name: str) -> None:
    assert failures(on_two, name) == ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ON_ONE)
def test_wrong_order(on_one: list[dict[str, str]], name: str) -> None:
    assert failures(on_one, name) == ""


def _permuted_hsdp(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicate", "shard"))
    _refused(lambda: primus_odc.attach(shard(tiny_model(), mesh)), UnsupportedModelError, "ascending order")


def test_a_mesh_fsdp2_itself_would_mix_up() -> None:
    run_workers(_permuted_hsdp, 4)
