"""How the plugin gets into a Primus process: :func:`install`, called by torch's entry point or by :mod:`primus_odc.primus.launch`.

Primus keeps what it runs in ``primus.core.backend.backend_registry``. Torch and that module may be imported in either order: where it is
there already, our setup hook is registered at once; where it is not, a finder waits for that one module, registers the hook when it has
been imported, and leaves. Primus runs setup hooks before it builds arguments and looks up the trainer class.

Torch imports this file in every process that imports torch, training or not, and an exception here would break ``import torch``. Hence the
standard library only and little of it, no work beyond looking for one name, and no exception out of :func:`autoload`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

REGISTRY = "primus.core.backend.backend_registry"
BACKEND = "megatron"


def autoload() -> None:
    """Torch's entry point (group ``torch.backends``). Reports what goes wrong on stderr and never raises.

    A job is not trained on something else by that: stages ``odc_sft`` and ``odc_pretrain`` exist only with the plugin.
    """
    try:
        install()
    except Exception:  # noqa: BLE001  # any exception here would break `import torch` for the whole environment
        _report("the plugin could not be installed and is off in this process")


def install() -> None:
    """Make Primus call :func:`activate` in this process; may be called any number of times.

    Raises:
        AttributeError: this Primus has no registry of the known form.
    """
    registry = sys.modules.get(REGISTRY)
    # Without the class it is being executed, by our finder; that one registers the hook at its end.
    if registry is not None and hasattr(registry, "BackendRegistry"):
        _register(registry)
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def activate() -> None:
    """Primus' setup hook: register the trainer classes.

    Raises:
        SystemExit: it failed. Primus reports any other exception of a setup hook and goes on without the plugin.
    """
    try:
        from primus_odc.primus.registration import register_trainers

        register_trainers()
    except Exception as error:
        _report("the plugin cannot be used with this Primus")
        raise SystemExit(f"primus_odc: {error}") from error


def _report(what: str) -> None:
    import traceback

    print(f"primus_odc: {what}:\n{traceback.format_exc()}", file=sys.stderr)


def _register(registry: ModuleType) -> None:
    cls: Any = registry.BackendRegistry
    if not getattr(cls, "_primus_odc_hooked", False):
        cls.register_setup_hook(BACKEND, activate)
        cls._primus_odc_hooked = True


class _RegistryFinder:
    """Finds Primus' registry as Python would, and has the hook registered once it was executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _RegisteringLoader:
    def __init__(self, loader: Any, finder: _RegistryFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register(module)
