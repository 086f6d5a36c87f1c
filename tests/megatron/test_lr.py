from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from primus_odc.errors import ConfigError
from primus_odc.megatron.lr import build_scheduler

BASE: dict[str, Any] = {"train_iters": 20, "lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 4, "weight_decay": 0.05}


def optimizer() -> torch.optim.Optimizer:
    decayed, plain = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [decayed]}, {"params": [plain], "wd_mult": 0.0}]
    return torch.optim.AdamW(groups, lr=0.5)


def schedule(params: dict[str, Any], steps: int) -> list[float]:
    """The rate each of the first `steps` optimizer steps uses."""
    optim = optimizer()
    scheduler, rates = build_scheduler(optim, params), []
    for _ in range(steps):
        rates.append(optim.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


def expected(style: str, step: int, decay_steps: int) -> float:
    if step <= 4:
        return step / 4
    if style == "constant":
        return 1.0
    done = min(1.0, (step - 4) / (decay_steps - 4))
    return 0.1 + 0.9 * (0.5 * (1 + math.cos(math.pi * done)) if style == "cosine" else 1 - done)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("decay_steps", [None, 12])
def test_warm_up_then_decay(style: str, decay_steps: int | None) -> None:
    params = {**BASE, "lr_decay_style": style, "lr_decay_iters": decay_steps}
    assert schedule(params, 20) == pytest.approx([expected(style, k, decay_steps or 20) for k in range(20)])


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert schedule({"train_iters": 10, "lr": 1.0}, 3) == pytest.approx([1.0, 0.9, 0.8])
    assert schedule({"train_iters": 10, "lr": 1.0, "lr_warmup_fraction": 0.2, "lr_warmup_init": 0.5}, 3) == pytest.approx([0.5, 0.75, 1.0])


def test_weight_decay_follows_each_group() -> None:
    optim = optimizer()
    build_scheduler(optim, BASE)
    assert [group["weight_decay"] for group in optim.param_groups] == [0.05, 0.0]
    ramp = {**BASE, "weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.2}
    scheduler = build_scheduler(optim, ramp)
    scheduler.step(10)
    assert optim.param_groups[0]["weight_decay"] == pytest.approx(0.1)


def test_a_resumed_schedule_goes_on_where_it_stopped() -> None:
    straight = schedule(BASE, 12)
    first = build_scheduler(optimizer(), BASE)
    first.step(7)
    optim = optimizer()
    second = build_scheduler(optim, BASE)
    second.load_state_dict(first.state_dict())
    assert optim.param_groups[0]["lr"] == straight[7]
    with pytest.raises(AssertionError, match="learning rate"):
        build_scheduler(optimizer(), {**BASE, "lr": 2.0}).load_state_dict(first.state_dict())
    build_scheduler(optimizer(), {**BASE, "lr": 2.0, "override_opt_param_scheduler": True}).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"lr": None}, "lr is missing"),
        ({"min_lr": 2.0}, "must be at most lr"),
        ({"lr_decay_style": "cosin"}, "lr_decay_style: 'cosin' is not one of linear, cosine"),
        ({"start_weight_decay": 0.0}, "start_weight_decay is the number 0.0 and needs weight_decay_incr_style: linear or cosine"),
        ({"end_weight_decay": 0.1}, "end_weight_decay is the number 0.1 and needs"),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "lr_warmup_fraction and lr_warmup_iters exclude each other"),
        ({"lr_warmup_iters": 20}, "must be shorter than lr_decay_iters"),
        ({"train_iters": None}, "train_iters is missing; it must be a whole number of at least 1"),
        ({"lr_warmup_iters": "few"}, "lr_warmup_iters is the text 'few'"),
        ({"lr_decay_iters": "many"}, "lr_decay_iters is the text 'many'"),
        ({"weight_decay": True}, "weight_decay is true"),
        ({"lr": math.inf}, "lr is the number inf"),
        ({"lr_decay_style": "WSD"}, "needs lr_wsd_decay_iters"),
        ({"weight_decay_incr_style": "linear"}, "start_weight_decay is missing"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 21},
            "lr_wsd_decay_iters (21) must be at most lr_decay_iters",
        ),
        ({"lr_decay_iters": 12.5}, "lr_decay_iters is the number 12.5; it must be a whole number of at least 1"),
        ({"lr_warmup_iters": 2.5}, "lr_warmup_iters is the number 2.5; it must be a whole number of at least 0"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2.5}, "lr_wsd_decay_iters is the number 2.5; it must be a whole number"),
        ({"lr_warmup_iters": False, "lr_warmup_fraction": 0.1}, "lr_warmup_iters is false"),
        ({"lr_warmup_iters": "", "lr_warmup_fraction": 0.1}, "lr_warmup_iters is the text ''"),
        ({"lr_warmup_iters": None, "lr_warmup_fraction": 1.0}, "must be shorter than lr_decay_iters"),
        ({"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}, "exclude each other"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(optimizer(), {**BASE, **changes})
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_keys_are_checked_without_torch() -> None:
    code = (
        "import sys; from primus_odc.megatron.schedule import schedule as s; s({'train_iters': 3, 'lr': 1}); exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong = {"train_iters": "x", "lr": -1, "min_lr": None, "weight_decay": "y", "lr_decay_style": "cosin", "lr_warmup_init": []}
    with pytest.raises(ConfigError) as caught:
        build_scheduler(optimizer(), {**BASE, **wrong})
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        "train_iters",
        "lr",
        "min_lr",
        "lr_warmup_init",
        "weight_decay",
        "lr_decay_style",
    ]
    with pytest.raises(ConfigError) as caught:
        build_scheduler(optimizer(), {**BASE, "weight_decay": "y", "min_lr": 2.0, "lr_warmup_iters": 20})
    assert len(caught.value.problems) == 3
