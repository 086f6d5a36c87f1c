"""T5: a microbatch with every label masked contributes 0, leaves the token count alone and is warned of once."""

from __future__ import annotations

import logging

from tests.megatron.arm_cases import ARMS, CAP, PARAMS, Reference, full, make_arm, masked, minibatch_of, weights
from tests.megatron.gpt_cases import make_samples, relative_error
from tests.workers import run_workers

WORLD = 2
ROUNDS = 2


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_case(rank: int, world_size: int) -> dict[str, list[str]]:
    # The masked sample fills a microbatch by itself.
    samples = make_samples((CAP, 40, 30, 20), seed=4)
    samples[0] = masked(samples[0])
    warned: dict[str, list[str]] = {}
    for name in ARMS:
        messages = Messages()
        logging.getLogger("primus_odc").addHandler(messages)
        arm = make_arm(name)
        reference = Reference(weights(arm))
        for step in range(ROUNDS):
            minibatch = minibatch_of(arm, step, samples)
            assert minibatch.target_tokens == sum(int(s.target_mask.sum()) for s in samples[1:])
            # The reference never sees the masked sample.
            loss, gradients = reference.step(samples[1:], arm.learning_rate)
            outcome = arm.train_step(minibatch)
            assert not outcome.skipped and outcome.loss is not None
            assert abs(outcome.loss - loss) <= 1e-6 * loss, (name, step)
            if step == 0:
                for parameter, p in arm.model.named_parameters():
                    gradient = full(arm.optimizer.state[p]["exp_avg"]) / (1 - PARAMS["adam_beta1"])
                    assert relative_error(gradient, gradients[parameter]) <= 1e-6, (name, parameter)
        arm.close()
        logging.getLogger("primus_odc").removeHandler(messages)
        warned[name] = messages.texts
    return warned


def test_masked_microbatch_adds_nothing_and_is_told_once() -> None:
    results = run_workers(run_case, WORLD)
    for name in ARMS:
        texts = [text for result in results for text in result[name]]
        assert len(texts) == 1, (name, texts)
        assert "no sample of microbatch" in texts[0] and "s0" in texts[0] and "not mentioned again" in texts[0]
