"""Which stage of a Primus trainer module leads to which trainer class.

=================  ===================================================================================================================
``stage``          what trains
=================  ===================================================================================================================
``odc_sft``        :class:`~primus_odc.primus.trainers.OdcSftTrainer`; needs ``comm_backend``
``odc_pretrain``   :class:`~primus_odc.primus.trainers.OdcPretrainTrainer`; needs ``comm_backend``
``sft``            with ``comm_backend`` as ``odc_sft``, without it the very trainer Primus registered
``pretrain``       with ``comm_backend`` as ``odc_pretrain``, without it the very trainer Primus registered
=================  ===================================================================================================================

The first two exist with the plugin only, so a file that names one cannot train on anything else by accident.
"""

from __future__ import annotations

import difflib
from typing import Any

from primus_odc.errors import ConfigError
from primus_odc.primus.loading import BACKEND

# As in primus_odc.config: below this similarity a key is somebody else's.
_SIMILAR = 0.85


def register_trainers() -> None:
    """Register our trainer classes; called after Primus registered its own.

    Raises:
        VersionError: Primus, Megatron or torch are of an untested version.
    """
    from primus.core.backend.backend_registry import BackendRegistry

    from primus_odc.primus.trainers import OdcPretrainTrainer, OdcSftTrainer

    for stage, ours in (("sft", OdcSftTrainer), ("pretrain", OdcPretrainTrainer)):
        BackendRegistry.register_trainer_class(ours, BACKEND, f"odc_{stage}")
        stock = BackendRegistry.get_trainer_class(BACKEND, stage)
        if not issubclass(stock, TrainerChoice):
            BackendRegistry.register_trainer_class(choice(stock, ours), BACKEND, stage)


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
    near = [key for key in keys if key != "comm_backend" and difflib.SequenceMatcher(None, key, "comm_backend").ratio() >= _SIMILAR]
    if near:
        raise ConfigError([f"{key} is not known, did you mean 'comm_backend'?" for key in near])
    return keys.get("comm_backend") is not None
