"""What a training loop does around the engine: evaluation, accumulation over steps, clipping, edits, detaching, other meshes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_

import primus_odc
from primus_odc.fsdp.engine import Engine
from tests.fsdp.checks import failures, relative_error, run_checks
from tests.fsdp.models import Tiny, check_gradients, full, loss_of, microbatch, reference_gradients, rows, shard, tiny_model
from tests.workers import run_workers

COUNTS = [3, 1]


def _run(engine: Engine, model: Tiny, step: int, counts: list[int] | None = None) -> None:
    """One minibatch up to settle."""
    counts = counts or COUNTS
    n = counts[dist.get_rank() % len(counts)]
    engine.begin_minibatch(n)
    for i in range(n):
        x, y = microbatch(step, dist.get_rank(), i)
        loss_of(model, x, y, rows(step, counts)).backward()
    engine.settle()


def _full_grads(model: Tiny) -> dict[str, torch.Tensor]:
    return {k: full(p.grad).clone() for k, p in model.named_parameters() if p.grad is not None}


def _whole(model: Tiny) -> Tiny:
    whole = tiny_model()
    whole.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
    return whole


def evaluation_with_any_count_per_rank() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model, parameters="reshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        engine.publish()  # evaluation before the first and between all minibatches
        whole = _whole(model)
        with torch.no_grad():
            for i in range(2 * dist.get_rank()):
                x, _ = microbatch(step, dist.get_rank(), i)
                torch.testing.assert_close(model(x), whole(x), rtol=1e-5, atol=1e-6)
        _run(engine, model, step)
        grads = _full_grads(model)
        for name, expected in reference_gradients(whole, step, COUNTS).items():
            assert relative_error(grads[name], expected) <= 1e-6, name
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


def gradients_add_up_until_zeroed() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    first, second = (reference_gradients(tiny_model(), s, COUNTS) for s in (0, 1))
    _run(engine, model, 0)
    _run(engine, model, 1)
    for name, grad in _full_grads(model).items():
        assert relative_error(grad, first[name] + second[name]) <= 1e-6, name
    model.zero_grad(set_to_none=False)
    _run(engine, model, 1)
    for name, grad in _full_grads(model).items():
        assert relative_error(grad, second[name]) <= 1e-6, name
    model.zero_grad()  # to None
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # the user's own tensors
    _run(engine, model, 0)
    for name, grad in _full_grads(model).items():
        assert relative_error(grad, first[name] + 1) <= 1e-6, name
    engine.begin_minibatch(0)
    model.zero_grad()  # between begin and settle counts too
    engine.settle()
    assert all(float(g.abs().max()) == 0.0 for g in _full_grads(model).values())
    engine.detach()


def gradient_buffers_persist() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    addresses = []
    for step in range(3):
        _run(engine, model, step)
        addresses.append([p.grad.to_local().data_ptr() for p in model.parameters() if p.grad is not None])  # type: ignore[attr-defined]
        model.zero_grad()
    assert addresses[0] == addresses[1] == addresses[2]
    engine.detach()


def clipping_equals_torch() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for max_norm in (0.01, 1e9):
            _run(engine, model, 0)
            whole = tiny_model().double()
            before = _full_grads(model)
            for name, p in whole.named_parameters():
                p.grad = before[name].double()
            expected = clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            norm = engine.clip_grad_norm_(max_norm, norm_type)
            torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
            after = _full_grads(model)
            for name, p in whole.named_parameters():
                assert p.grad is not None
                assert relative_error(after[name], p.grad) <= 1e-6, (norm_type, max_norm, name)
            model.zero_grad()
    engine.detach()


def norms_of_what_is_not_finite() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    _run(engine, model, 0)
    grad = next(p for p in model.parameters()).grad
    assert grad is not None
    grad.to_local().fill_(float("inf"))  # type: ignore[attr-defined]
    assert engine.grad_norm() == float("inf")
    assert engine.clip_grad_norm_(float("inf")) == float("inf")
    others = [p.grad.to_local() for p in list(model.parameters())[1:] if p.grad is not None]  # type: ignore[attr-defined]
    assert all(bool(other.isfinite().all()) for other in others), "max_norm=inf only measures"
    for bad in range(2):
        grad.to_local().fill_(float("nan") if dist.get_rank() == bad else 1.0)  # type: ignore[attr-defined]
        for norm_type in (2.0, 1.0, "inf"):
            norm = engine.grad_norm(norm_type)
            assert norm != norm, (bad, norm_type)
    for norm_type in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            engine.grad_norm(norm_type)
    engine.detach()


def edited_parameters_are_published() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    _run(engine, model, 0)
    model.zero_grad()
    for seed, assign in ((1, False), (2, True)):
        other = shard(tiny_model(seed))
        model.load_state_dict(other.state_dict(), assign=assign)
        engine.publish()
        _run(engine, model, 0)
        grads = _full_grads(model)
        for name, expected in reference_gradients(tiny_model(seed), 0, COUNTS).items():
            assert relative_error(grads[name], expected) <= 1e-6, name
        model.zero_grad()
    engine.publish()
    engine.publish()  # several in a row are several empty epochs
    engine.detach()


def detached_model_trains_natively_and_can_be_attached_again() -> None:
    model = shard(tiny_model(), init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, options in enumerate(({}, {"parameters": "resident"}, {"accumulate": "owner"})):
        engine = primus_odc.attach(model, **options)
        whole = _whole(model)
        _run(engine, model, step)
        grads = _full_grads(model)
        for name, expected in reference_gradients(whole, step, COUNTS).items():
            assert relative_error(grads[name], expected) <= 1e-6, name
        optimizer.step()
        optimizer.zero_grad()
        engine.detach()
        whole = _whole(model)
        x, y = microbatch(step, dist.get_rank(), 0)
        loss_of(model, x, y, rows(step, [1, 1])).backward()  # collectives; FSDP2 takes the mean over two ranks
        grads = _full_grads(model)
        for name, expected in reference_gradients(whole, step, [1, 1]).items():
            assert relative_error(2 * grads[name], expected) <= 1e-6, name
        optimizer.step()
        optimizer.zero_grad()


def detaching_settles_first() -> None:
    model = shard(tiny_model())
    engine = primus_odc.attach(model)
    engine.begin_minibatch()
    for i in range(COUNTS[dist.get_rank()]):
        x, y = microbatch(0, dist.get_rank(), i)
        loss_of(model, x, y, rows(0, COUNTS)).backward()
    engine.detach()
    grads = _full_grads(model)
    for name, expected in reference_gradients(tiny_model(), 0, COUNTS).items():
        assert relative_error(grads[name], expected) <= 1e-6, name


@contextlib.contextmanager
def _counted_collectives() -> Iterator[list[str]]:
    calls: list[str] = []
    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv", "isend"))]
    with contextlib.ExitStack() as stack:
        for name in names:
            original = getattr(dist, name)
            if callable(original):

                def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                    calls.append(_name)
                    return _original(*args, **kwargs)

                stack.enter_context(mock.patch.object(dist, name, counted))
        yield calls


def no_collective_in_a_step() -> None:
    for options in ({"accumulate": "local"}, {"accumulate": "owner", "parameters": "resident"}):
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **options)
        with _counted_collectives() as calls:
            for step in range(2):
                _run(engine, model, step)
                engine.clip_grad_norm_(1.0)
                engine.publish()
        assert calls == []
        stats = engine.stats()
        assert stats["microbatches"] == COUNTS[dist.get_rank()] and stats["bytes_reduced"] > 0
        engine.detach()


def an_owner_that_stands_still_stops_no_reduction() -> None:
    """``owner`` mode: rank 1 holds its interpreter for two seconds, progress thread included, so that no slot becomes free meanwhile."""
    model, counts = shard(tiny_model()), [6, 1]
    engine = primus_odc.attach(model, accumulate="owner", parameters="resident")
    _run(engine, model, 0, counts)  # gathers need no help of rank 1's interpreter; what a first step sets up does
    model.zero_grad()
    if dist.get_rank() == 1:
        engine.begin_minibatch(counts[1])
        dist.barrier()
        ctypes.PyDLL(None).sleep(2)
    else:
        engine.begin_minibatch(counts[0])
        dist.barrier()
        started = time.monotonic()
    for i in range(counts[dist.get_rank()]):
        x, y = microbatch(1, dist.get_rank(), i)
        loss_of(model, x, y, rows(1, counts)).backward()
    if dist.get_rank() == 0:
        assert time.monotonic() - started < 1.5
        assert (engine.stats()["sums_kept"] > 0) == (engine.choices.accumulate == "owner")  # across nodes there is no owner mode
    engine.settle()
    grads = _full_grads(model)
    for name, expected in reference_gradients(tiny_model(), 1, counts).items():
        assert relative_error(grads[name], expected) <= 1e-6, name
    engine.detach()


def deterministic_is_bit_identical() -> None:
    runs = []
    for _ in range(3):
        model = shard(tiny_model())
        engine = primus_odc.attach(model, deterministic=True)
        _run(engine, model, 0)
        runs.append(_full_grads(model))
        engine.detach()
    assert all(torch.equal(runs[0][k], run[k]) for run in runs[1:] for k in run)


def a_dropped_engine_is_freed() -> None:
    threads = threading.active_count()
    for accumulate in ("local", "owner", "owner"):
        model = shard(tiny_model())
        engine = primus_odc.attach(model, accumulate=accumulate)
        _run(engine, model, 0)
        dist.barrier()
        reference = weakref.ref(engine)
        del model, engine
        gc.collect()
        assert reference() is None
        dist.barrier()
    assert threading.active_count() == threads  # watchers and progress threads have ended too


def memory_is_what_the_formula_says() -> None:
    for options in ({"accumulate": "local"}, {"accumulate": "owner"}, {"accumulate": "owner", "verify": "checksum"}):
        model = shard(tiny_model())
        engine = primus_odc.attach(model, **options)
        arena = sum(engine.memory[k] for k in ("shards", "gradients", "ring", "fan_out", "staging"))
        control = 8192  # words, abort text and the start-up pattern, rounded up
        assert arena <= engine._heap.arena_nbytes <= arena + control + 256 * 4
        plane, gradients = engine._plane, engine._gradients
        ordinary = [*gradients.flat.values(), gradients._scratch, *engine._reducers[0]._zeros._buffers.values()]
        ordinary += [plane._scratch, plane._staging, *(plane._own if engine.choices.accumulate == "owner" else [])]
        assert sum(t.nbytes for t in ordinary) == sum(engine.memory[k] for k in ("own", "grad", "sum", "zeros"))
        engine.detach()


def _meshes_of_two_by_two() -> list[DeviceMesh]:
    return [
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard")),  # strided shard groups
    ]


def strided_groups() -> None:
    for mesh in _meshes_of_two_by_two():
        for options in ({"accumulate": "local"}, {"accumulate": "owner"}):
            assert check_gradients(tiny_model, [[3, 1, 0, 2], [0, 0, 1, 0]], options, mesh) <= 1e-6


def permuted_group() -> None:
    mesh = DeviceMesh("cpu", [2, 0, 3, 1])
    for options in ({"accumulate": "local"}, {"accumulate": "owner"}):
        assert check_gradients(tiny_model, [[3, 1, 0, 2]], {**options, "verify": "reference"}, mesh) <= 1e-6


def two_models_on_two_halves() -> None:
    """Each half of the ranks trains its own model; neither knows of the other."""
    pairs = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("half", "shard"))
    model = shard(tiny_model(dist.get_rank() % 2), pairs["shard"])
    engine = primus_odc.attach(model)
    counts = [3, 1]
    me = pairs["shard"].get_local_rank()
    engine.begin_minibatch(counts[me])
    for i in range(counts[me]):
        x, y = microbatch(0, me, i)
        loss_of(model, x, y, rows(0, counts)).backward()
    engine.settle()
    grads = _full_grads(model)
    for name, expected in reference_gradients(tiny_model(dist.get_rank() % 2), 0, counts).items():
        assert relative_error(grads[name], expected) <= 1e-6, name
    engine.detach()


def replicas_agree_bit_for_bit() -> None:
    for options in ({"deterministic": True}, {"accumulate": "owner"}):
        model = shard(tiny_model(), _meshes_of_two_by_two()[0])
        engine = primus_odc.attach(model, **options)
        _run(engine, model, 0, [3, 1, 0, 2])
        mine = torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters() if p.grad is not None])  # type: ignore[attr-defined]
        everyone: list[torch.Tensor] = [mine] * 4
        dist.all_gather_object(everyone, mine)
        assert torch.equal(everyone[0], everyone[2]) and torch.equal(everyone[1], everyone[3])
        norm = engine.grad_norm()
        whole = torch.cat([g.reshape(-1) for g in reference_gradients(tiny_model(), 0, [3, 1, 0, 2]).values()]).norm()
        assert abs(norm / float(whole) - 1) <= 1e-6
        engine.detach()


ON_TWO = {
    f.__name__: f
    for f in (
        evaluation_with_any_count_per_rank,
        gradients_add_up_until_zeroed,
        gradient_buffers_persist,
        clipping_equals_torch,
        norms_of_what_is_not_finite,
        edited_parameters_are_published,
        detached_model_trains_natively_and_can_be_attached_again,
        detaching_settles_first,
        no_collective_in_a_step,
        an_owner_that_stands_still_stops_no_reduction,
        deterministic_is_bit_identical,
        memory_is_what_the_formula_says,
        a_dropped_engine_is_freed,
    )
}
ON_FOUR = {f.__name__: f for f in (strided_groups, permuted_group, two_models_on_two_halves, replicas_agree_bit_for_bit)}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, str]]:
    return run_workers(run_checks, 2, ON_TWO, timeout_s=100)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, str]]:
    return run_workers(run_checks, 4, ON_FOUR, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ON_TWO)
def test_loop(on_two: list[dict[str, str]], name: str) -> None:
    assert failures(on_two, name) == ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ON_FOUR)
def test_groups(on_four: list[dict[str, str]], name: str) -> None:
    assert failures(on_four, name) == ""
