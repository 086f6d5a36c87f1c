"""The versions of torch, megatron-core and Primus this release was tested with, enforced at run time.

They are no hard dependencies: inside a Primus image both are there already and must not be changed. So what is really imported is looked
at, before anything relies on it, and anything else than the tested range is refused with the version found, the range and what to
install. Pre-releases and local builds (``2.11.0a0+rocm``) count as the release they lead to.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import dataclass
from types import ModuleType

from primus_odc.errors import VersionError


@dataclass(kw_only=True, slots=True, frozen=True)
class TestedRange:
    """A dependency's versions from ``first`` (included) to ``end`` (excluded), as (major, minor)."""

    __test__ = False

    module: str
    """The module to import, whose ``__version__`` counts."""

    package: str
    """The name under which it is installed."""

    first: tuple[int, int]
    end: tuple[int, int]

    advice: str = ""
    """What to do about another version; empty: install one with pip."""

    def __str__(self) -> str:
        return f"{self.package}>={self.first[0]}.{self.first[1]},<{self.end[0]}.{self.end[1]}"


TORCH = TestedRange(module="torch", package="torch", first=(2, 11), end=(2, 14))
MEGATRON = TestedRange(module="megatron.core", package="megatron-core", first=(0, 16), end=(0, 17))
PRIMUS = TestedRange(module="primus", package="primus", first=(26, 5), end=(26, 6), advice="use AMD-AGI/Primus 26.5")

# The public methods of FSDPModule the engine stands on, with the parameters it passes.
FSDP2_HOOKS: dict[str, tuple[str, ...]] = {
    "set_custom_all_gather": ("comm",),
    "set_custom_reduce_scatter": ("comm",),
    "set_gradient_divide_factor": ("factor",),
    "set_force_sum_reduction_for_comms": ("enable",),
    "set_requires_all_reduce": ("requires_all_reduce", "recurse"),
    "set_reshard_after_forward": ("reshard_after_forward", "recurse"),
    "set_reshard_after_backward": ("reshard_after_backward", "recurse"),
    "unshard": ("async_op",),
    "reshard": (),
}


def require_torch() -> None:
    """Refuse a torch that is missing or outside the tested range.

    Raises:
        VersionError: with the version found, the range, and what to install.
    """
    _require(TORCH)


def require_megatron() -> None:
    """Refuse a megatron-core that is missing or outside the tested range.

    Raises:
        VersionError: with the version found, the range, and what to install.
    """
    _require(MEGATRON)


def require_standalone() -> None:
    """:func:`require_torch` and :func:`require_megatron`, for what runs without Primus.

    Megatron's warnings at import are left out: they are about packages that nothing here uses.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    require_torch()
    require_megatron()


def require_primus() -> None:
    """Refuse a Primus that is missing or outside the tested range.

    Raises:
        VersionError: with the version found, the range, and what to check out.
    """
    _require(PRIMUS)


def require_fsdp2() -> None:
    """Refuse a torch whose FSDP2 lacks a hook the engine needs, or takes other parameters for it; includes :func:`require_torch`.

    Raises:
        VersionError: with the torch version, the range, and every hook that does not fit.
    """
    torch = _require(TORCH)
    found = f"torch {torch.__version__}, tested is {TORCH}"
    try:
        module_class = importlib.import_module("torch.distributed.fsdp").FSDPModule
    except (ImportError, AttributeError) as error:
        raise VersionError(f"torch.distributed.fsdp.FSDPModule is missing ({found}): {error}; {_advice(TORCH)}") from error
    misfits = [misfit for name, wanted in FSDP2_HOOKS.items() if (misfit := _misfit(module_class, name, wanted)) is not None]
    if misfits:
        raise VersionError(f"FSDP2 of this torch does not fit ({found}): {'; '.join(misfits)}; {_advice(TORCH)}")


def _require(tested: TestedRange) -> ModuleType:
    try:
        module = importlib.import_module(tested.module)
    except ImportError as error:
        raise VersionError(f"{tested.package} cannot be imported ({error}); {_advice(tested)}") from error
    version = str(getattr(module, "__version__", "unknown"))
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or not tested.first <= (int(release[1]), int(release[2])) < tested.end:
        raise VersionError(f"{tested.package} {version} is outside the tested range {tested}; {_advice(tested)}")
    return module


def _advice(tested: TestedRange) -> str:
    return tested.advice or f"install one of the range, for example: pip install '{tested}'"


def _misfit(module_class: type, name: str, wanted: tuple[str, ...]) -> str | None:
    """What keeps us from calling the method with the parameters ``wanted``; None when nothing does."""
    method = getattr(module_class, name, None)
    if method is None:
        return f"FSDPModule.{name} is missing"
    parameters = list(inspect.signature(method).parameters.values())[1:]
    unknown = [p for p in wanted if p not in [parameter.name for parameter in parameters]]
    demanded = [
        p.name
        for p in parameters
        if p.name not in wanted
        and p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if not unknown and not demanded:
        return None
    return f"FSDPModule.{name} takes ({', '.join(p.name for p in parameters)}) where ({', '.join(wanted)}) is needed"
