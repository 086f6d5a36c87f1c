"""What stands before anything is shared: the model's units, and what all ranks have to agree on."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from primus_odc.config import OdcConfig
from primus_odc.errors import ProtocolError, UnsupportedModelError
from primus_odc.fsdp.binding import restore_collectives
from primus_odc.fsdp.choices import Choices, choose, require_agreement, resolve_transport
from primus_odc.fsdp.mesh import Mesh, find_mesh
from primus_odc.fsdp.probe import Unit, find_units, reshard
from primus_odc.versions import require_fsdp2


class Prepared(NamedTuple):
    """``modules``: all FSDP2 modules, the root first."""

    modules: list[FSDPModule]
    mesh: Mesh
    device: torch.device
    units: list[Unit]
    choices: Choices


def prepare(model: nn.Module, config: OdcConfig, attached: Collection[FSDPModule]) -> Prepared:
    """Look at the model and choose modes (collective over its mesh); on an error FSDP2 has its own communication.

    Args:
        attached: modules that have an engine.

    Raises:
        ConfigError, UnsupportedModelError, VersionError: as :func:`primus_odc.attach`.
        ProtocolError: the model, or a part of it, is among ``attached``.
        PeerError: another rank could not go on, with its reason.
    """
    require_fsdp2()
    if not isinstance(model, FSDPModule):
        raise UnsupportedModelError(
            f"attach() needs the root FSDP2 module, not {type(model).__name__}: call fully_shard on the whole model last, then attach "
            "that (a wrapper made around it, as by torch.compile(), is for your calls only)"
        )
    modules: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if any(module in attached for module in modules):
        raise ProtocolError("this model, a part of it or one that it is part of has an engine already: detach() that first")
    reshard(modules, ())  # an evaluation may have left modules unsharded
    mesh = find_mesh(model)
    device = next(model.parameters()).device
    try:
        with mesh.together("attach"):
            units = find_units(model, mesh.shards)
            transport = resolve_transport(config, device.type, len(set(mesh.machines)))
        specs = [u.spec for u in units]
        choices = choose(config, transport, specs, mesh, device)
        require_agreement(config, choices, mesh, specs)
    except BaseException:
        restore_collectives(modules)  # find_units leaves recorders behind
        raise
    return Prepared(modules, mesh, device, units, choices)
