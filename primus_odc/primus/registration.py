"""Which stage of a Primus trainer module leads to which trainer class.

=================  ===================================================================================================================
``stage``          what trains
=================  ===================================================================================================================
``odc_sft``        :class:`~primus_odc.primus.trainers.OdcSftTrainer`; needs ``comm_backend``
``odc_pretrain``   :class:`~primus_odc.primus.trainers.OdcPretrainTrainer`; needs ``comm_backend``
``sft``            with ``comm_backend`` as ``odc_sft``, without it the very trainer Primus registered
``pretrain``       with ``comm_backend`` as ``odc_pretrain``, without it the very trainer Primus registered
=================  ===================================================================================================================

The first two exist with the plugin only, so a file that names one cannot train on anything else by accident. ``comm_backend`` beside a
``trainer_class``, or a stage of somebody else, would reach neither and be ignored; a check in Primus' set-up phase ends that job.
"""

from __future__ import annotations

from typing import Any

from primus_odc._config_keys import resembles
from primus_odc.errors import ConfigError
from primus_odc.primus.loading import BACKEND


def register_trainers() -> None:
    """Register our trainer classes; called after Primus registered its own.

    Raises:
        VersionError: Primus, Megatron or torch are of an untested version.
    """
    from primus.core.backend.backend_registry import BackendRegistry
    from primus.core.patches import register_patch

    from primus_odc.primus.trainers import OdcPretrainTrainer, OdcSftTrainer

    for stage, ours in (("sft", OdcSftTrainer), ("pretrain", OdcPretrainTrainer)):
        BackendRegistry.register_trainer_class(ours, BACKEND, f"odc_{stage}")
        stock = BackendRegistry.get_trainer_class(BACKEND, stage)
        if not issubclass(stock, TrainerChoice):
            BackendRegistry.register_trainer_class(choice(stock, ours), BACKEND, stage)
    # A later patch of the same id takes the place of the former.
    register_patch(
        "primus_odc.comm_backend_is_used",
        backend=BACKEND,
        phase="setup",
        description="End a job whose comm_backend no trainer of primus_odc sees",
    )(require_arm)


def require_arm(context: Any) -> None:
    """A patch of Primus, run once its trainer was made.

    Raises:
        SystemExit: ``comm_backend`` is set, and the trainer is not ours. Primus reports any other exception of a patch and goes on.
    """
    from primus_odc.primus.trainers import ArmTrainer

    args = context.extra["backend_args"]
    if getattr(args, "comm_backend", None) is not None and not ArmTrainer.made:
        named = f"trainer_class: {args.trainer_class}" if getattr(args, "trainer_class", None) else f"stage: {getattr(args, 'stage', None)}"
        raise SystemExit(
            f"primus_odc: comm_backend: {args.comm_backend} is set, but {named} leads to a trainer that ignores it: remove trainer_class "
            "and set stage to odc_sft or odc_pretrain, or unset comm_backend"
        )


class TrainerChoice:
    """Registered for a stage of Primus' own: calling it makes a trainer of ours or, without ``comm_backend``, Primus' own."""

    stock: type
    ours: type

    def __new__(cls, backend_args: Any = None, **context: Any) -> Any:
        chosen = cls.ours if asks_for_us(backend_args) else cls.stock
        return chosen(backend_args=backend_args, **context)


def choice(stock: type, ours: type) -> type[TrainerChoice]:
    """The class to register in place of ``stock``, under whose name Primus logs it."""
    return type(stock.__name__, (TrainerChoice,), {"stock": stock, "ours": ours})


def asks_for_us(args: Any) -> bool:
    """Whether ``comm_backend`` is set.

    Raises:
        ConfigError: a key is nearly ``comm_backend``, and would be ignored.
    """
    keys = vars(args)
    near = [key for key in keys if key != "comm_backend" and resembles(key, "comm_backend")]
    if near:
        raise ConfigError([f"{key} is not known, did you mean 'comm_backend'?" for key in near])
    return keys.get("comm_backend") is not None
