"""Primus' Megatron trainers, training an arm.

Nothing that touches numbers lives in a patch of Primus, because Primus logs a patch that fails and goes on: what is raised here ends the
job, on every rank.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from primus.backends.megatron.megatron_pretrain_trainer import MegatronPretrainTrainer
from primus.backends.megatron.megatron_sft_trainer import MegatronSFTTrainer

from primus_odc.megatron.train_keys import KNOWN_KEYS
from primus_odc.primus.refusals import Checked, Kind, check

logger = logging.getLogger("primus_odc")

# What every arm trains with, whatever the YAML says; the value that Primus' presets have is the other one.
_FORCED = {
    "calculate_per_token_loss": (True, "every target token of a minibatch counts the same, on whichever rank it is"),
    "dataloader_type": ("external", "one planned iterator for all arms"),
}


class ArmTrainer:
    """Mixin for a Megatron trainer of Primus: refuses early, then runs Primus' training inside the loop of the arm."""

    kind: ClassVar[Kind]
    made: ClassVar[bool] = False
    """Whether this process made one."""
    backend_args: Any

    def __init__(self, backend_args: Any = None, **context: Any) -> None:
        super().__init__(backend_args=backend_args, **context)  # type: ignore[call-arg]
        ArmTrainer.made = True
        self._folder = Path(context["primus_config"].exp_root_path)  # workspace/work_group/user_name/exp_name

    def setup(self) -> None:
        """Primus' set-up, once the arguments are known to be possible.

        Raises:
            ConfigError: everything that is wrong with them.
        """
        args = self.backend_args
        self._checked: Checked = check(args, self.kind)
        self._config = {key: _plain(value) for key, value in vars(args).items() if key in KNOWN_KEYS}
        for key, (value, reason) in _FORCED.items():
            if getattr(args, key, None) != value and args.rank == 0:
                logger.info("%s: %s, as in every arm (the configuration has %s): %s", key, value, getattr(args, key, None), reason)
            setattr(args, key, value)
        super().setup()  # type: ignore[misc]

    def train(self) -> None:
        """Train the arm."""
        import torch
        from megatron.training import training

        from primus_odc.megatron.arm import policy_of
        from primus_odc.megatron.meter import Meter
        from primus_odc.megatron.run_options import cost_model_of
        from primus_odc.primus.loop import ArmLoop
        from primus_odc.primus.report import StepReporter

        args, comm = self.backend_args, self._checked.comm
        meter = Meter(torch.device("cuda" if args.distributed_backend == "nccl" else "cpu"))
        cost_model = cost_model_of(comm.odc, lambda: (args, args.swiglu, args.recompute_granularity == "full"))
        self._reporter = StepReporter(comm.arm, meter, args.log_interval, args.train_iters)
        self._loop = ArmLoop(comm, self._reporter, meter)
        self._planning: dict[str, Any] = {"policy": policy_of(comm.arm), "cost_model": cost_model}
        if args.rank == 0:
            logger.info(
                "arm %s: counts of microbatches %s between ranks; %s plan with cost model %s, at most %d tokens a microbatch",
                comm.arm,
                "decoupled" if comm.arm == "odc_nopad" else "aligned",
                self._planning["policy"],
                cost_model.name,
                self._checked.max_tokens,
            )
        with self._loop.installed(training):
            self._pretrain()

    def _pretrain(self) -> None:
        raise NotImplementedError

    def _use(self, source: Any, dataset: Any) -> None:
        """Called by a datasets provider, after a checkpoint was loaded."""
        self._loop.use(source)
        if self.backend_args.rank == 0:
            summary = getattr(dataset, "summary", None)
            logger.info("data: %s", summary() if summary else f"{len(dataset)} samples of {self.backend_args.seq_length} tokens")
            self._reporter.open(self._folder, self.backend_args.iteration, self.backend_args, source.identity, self._config)


class OdcSftTrainer(ArmTrainer, MegatronSFTTrainer):
    """Supervised fine-tuning: stage ``odc_sft``, or ``sft`` with ``comm_backend``."""

    kind = "sft"

    def setup(self) -> None:
        super().setup()
        from primus_odc.data import build_tokenizer

        args, params = self.backend_args, self._checked.params
        vocabulary = build_tokenizer(params).vocab_size
        # Megatron takes its vocabulary from a tokenizer of its own, and does not know all of ours; this one has a token more than its size.
        args.tokenizer_type, args.vocab_size = "NullTokenizer", vocabulary - 1
        if args.rank == 0:
            logger.info("tokenizer %s with %d tokens, read by primus_odc", params["tokenizer_type"], vocabulary)

    def _pretrain(self) -> None:
        from megatron.training import get_args, pretrain
        from primus.backends.megatron.sft.runtime import run_sft_pretrain
        from primus.core.utils.import_utils import get_model_provider

        from primus_odc.primus import sft

        run_sft_pretrain(
            pretrain_fn=pretrain,
            datasets_provider=sft.datasets_provider(get_args, self._checked, self._folder.parents[2], self._use, **self._planning),
            model_provider=sft.model_provider(get_model_provider(), self.backend_args),
            forward_step=sft.forward_step,
        )


class OdcPretrainTrainer(ArmTrainer, MegatronPretrainTrainer):
    """Pretraining: stage ``odc_pretrain``, or ``pretrain`` with ``comm_backend``."""

    kind = "pretrain"

    def get_datasets_provider(self) -> Any:
        """Primus' own, planned."""
        from megatron.training import get_args

        from primus_odc.primus import pretrain

        native = super().get_datasets_provider()
        return pretrain.datasets_provider(get_args, native, self._use, max_tokens=self._checked.max_tokens, **self._planning)

    def _pretrain(self) -> None:
        MegatronPretrainTrainer.train(self)


def _plain(value: Any) -> Any:
    """Blocks, which Primus hands out as namespaces, and names of Megatron, as JSON can hold them."""
    if isinstance(value, SimpleNamespace):
        return {key: _plain(item) for key, item in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
