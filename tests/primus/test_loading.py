"""How the plugin gets into a process, against a stand-in for Primus that has its public registry interface and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As Primus': setup hooks that raise are reported and left, and the hooks of a backend run in the order in which they were registered.
REGISTRY = """
class BackendRegistry:
    _hooks, _trainers = {}, {}

    @classmethod
    def register_setup_hook(cls, backend, hook_fn):
        cls._hooks.setdefault(backend, []).append(hook_fn)

    @classmethod
    def run_setup(cls, backend):
        for hook in cls._hooks.get(backend, []):
            try:
                hook()
            except Exception as error:
                print("swallowed", error)

    @classmethod
    def register_trainer_class(cls, trainer_cls, backend, stage="pretrain"):
        cls._trainers[backend, stage] = trainer_cls

    @classmethod
    def get_trainer_class(cls, backend, stage="pretrain"):
        return cls._trainers[backend, stage]
"""
PATCHES = """
def register_patch(patch_id, *, description="", backend=None, phase=None):
    def register(handler):
        PATCHES[patch_id] = (backend, phase, handler)
        return handler
    return register

PATCHES = {}
"""
TRAINER = """
class {name}:
    def __init__(self, backend_args=None, **context):
        self.backend_args = backend_args

    def setup(self):
        print("stock setup")
"""
CLI = """
import sys

def main():
    from primus.core.backend.backend_registry import BackendRegistry
    print("PRIMUS", sys.argv[1:], len(BackendRegistry._hooks["megatron"]))
    raise SystemExit(7)
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a package `primus`."""
    files = {
        "core/backend/backend_registry.py": REGISTRY,
        "core/patches/__init__.py": PATCHES,
        "backends/megatron/megatron_sft_trainer.py": TRAINER.format(name="MegatronSFTTrainer"),
        "backends/megatron/megatron_pretrain_trainer.py": TRAINER.format(name="MegatronPretrainTrainer"),
        "cli/main.py": CLI,
    }
    for name, content in files.items():
        path = tmp_path / "primus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch(exist_ok=True)
    return tmp_path


@pytest.fixture
def run(checkout: Path) -> Run:
    """Runs Python code or words with the stand-in and this package on the path."""

    def start(*words: str, path: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        (checkout / "cwd").mkdir(exist_ok=True)  # `python -c` finds what lies in its working directory
        folders = path or (str(checkout), str(ROOT))
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(folders), **variables}
        command = [sys.executable, *(["-c", textwrap.dedent(words[0])] if len(words) == 1 else words)]
        return subprocess.run(command, env=environment, cwd=checkout / "cwd", capture_output=True, text=True, timeout=55)

    return start


def test_torch_finds_the_entry_point() -> None:
    found = [entry for entry in entry_points(group="torch.backends") if entry.name == "primus_odc"]
    assert [entry.value for entry in found] == ["primus_odc.primus.loading:autoload"]


def test_autoload_imports_the_standard_library_only(run: Run) -> None:
    result = run(
        """
        import sys
        from primus_odc.primus.loading import autoload
        autoload()
        names = {name.partition(".")[0] for name in sys.modules}
        print(sorted(name for name in names if name not in sys.stdlib_module_names and not name.startswith("_")))
        print(sorted(name for name in sys.modules if name.startswith("primus_odc")))
        """
    )
    lines = result.stdout.splitlines()
    assert lines[1] == "['primus_odc', 'primus_odc.primus', 'primus_odc.primus.loading']", result.stderr
    assert lines[0] in ("['primus_odc']", "['primus_odc', 'sitecustomize']"), result.stdout


def test_autoload_costs_less_than_five_milliseconds(run: Run) -> None:
    """Beside what torch imports itself: of several processes the quickest, as others use the machine."""
    code = """
        import sys, time
        import importlib.metadata, traceback  # torch has them when it looks for entry points
        start = time.perf_counter()
        from primus_odc.primus.loading import autoload
        autoload()
        print(time.perf_counter() - start)
        """
    run(code)  # compiles
    assert min(float(run(code).stdout) for _ in range(5)) < 0.005


@pytest.mark.parametrize("first", ["plugin", "primus"])
def test_either_may_be_imported_first(run: Run, first: str) -> None:
    lines = ["from primus_odc.primus.loading import install; install(); install()"]
    lines.insert(0 if first == "primus" else 1, "from primus.core.backend.backend_registry import BackendRegistry")
    lines += ["install()", "print([hook.__module__ for hook in BackendRegistry._hooks['megatron']])", "import sys"]
    lines += ["print([finder for finder in sys.meta_path if type(finder).__module__.startswith('primus_odc')])"]
    lines += ["import primus.core.backend.backend_registry as registry; print(type(registry.__loader__).__name__)"]
    result = run("\n".join(lines))
    assert result.stdout.splitlines() == ["['primus_odc.primus.loading']", "[]", "SourceFileLoader"], result.stderr


def test_looking_for_the_registry_without_importing_it_changes_nothing(run: Run) -> None:
    result = run(
        """
        import importlib.util
        from primus_odc.primus.loading import install
        install()
        assert importlib.util.find_spec("primus.core.backend.backend_registry") is not None
        from primus.core.backend.backend_registry import BackendRegistry
        print(len(BackendRegistry._hooks["megatron"]))
        """
    )
    assert result.stdout == "1\n", result.stderr


def test_a_process_without_primus_is_left_alone(run: Run) -> None:
    result = run(
        """
        from primus_odc.primus.loading import install
        install()
        try:
            import primus.core.backend.backend_registry
        except ModuleNotFoundError as error:
            print(error.name)
        """,
        path=(str(ROOT),),
    )
    assert result.stdout == "primus\n", result.stderr


def test_a_registry_of_another_form_breaks_no_import(run: Run, checkout: Path) -> None:
    (checkout / "primus/core/backend/backend_registry.py").write_text("class BackendRegistry: pass\n")
    result = run(
        """
        import primus.core.backend.backend_registry
        from primus_odc.primus.loading import autoload
        autoload()
        print("alive")
        """
    )
    assert (result.returncode, result.stdout) == (0, "alive\n")
    assert "primus_odc: the plugin could not be installed" in result.stderr
    assert "register_setup_hook" in result.stderr


def test_a_plugin_that_cannot_register_stops_the_job(run: Run, checkout: Path) -> None:
    (checkout / "primus/backends/megatron/megatron_sft_trainer.py").write_text("")
    result = run(
        """
        from primus_odc.primus.loading import install
        install()
        from primus.core.backend.backend_registry import BackendRegistry
        BackendRegistry.run_setup("megatron")
        print("went on")
        """
    )
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "MegatronSFTTrainer" in result.stderr


REGISTERED = """
from types import SimpleNamespace
from primus_odc.primus.loading import install
install()
from primus.backends.megatron.megatron_sft_trainer import MegatronSFTTrainer
from primus.backends.megatron.megatron_pretrain_trainer import MegatronPretrainTrainer
from primus.core.backend.backend_registry import BackendRegistry as registry
registry.register_trainer_class(MegatronSFTTrainer, "megatron", "sft")
registry.register_trainer_class(MegatronPretrainTrainer, "megatron", "pretrain")
registry.run_setup("megatron")
registry.run_setup("megatron")
config = SimpleNamespace(exp_root_path="w/g/u/e")
def make(stage, **keys):
    args = SimpleNamespace(rank=0, **keys)
    return registry.get_trainer_class("megatron", stage)(backend_args=args, primus_config=config)
"""


def test_stages_lead_to_our_trainers_or_to_the_very_ones_of_primus(run: Run) -> None:
    result = run(
        REGISTERED
        + """
for stage in ("sft", "pretrain", "odc_sft", "odc_pretrain"):
    for keys in ({}, {"comm_backend": None}, {"comm_backend": "odc_nopad"}):
        trainer = make(stage, **keys)
        print(stage, keys.get("comm_backend"), type(trainer).__name__)
print(registry.get_trainer_class("megatron", "sft").__name__)
make("sft").setup()
"""
    )
    assert result.returncode == 0, result.stderr
    *lines, name, stock = result.stdout.splitlines()
    ours = {"sft": "OdcSftTrainer", "pretrain": "OdcPretrainTrainer"}
    native = {"sft": "MegatronSFTTrainer", "pretrain": "MegatronPretrainTrainer"}
    expected = []
    for stage in ("sft", "pretrain"):
        expected += [f"{stage} None {native[stage]}"] * 2 + [f"{stage} odc_nopad {ours[stage]}"]
    for stage in ("sft", "pretrain"):
        expected += [f"odc_{stage} None {ours[stage]}"] * 2 + [f"odc_{stage} odc_nopad {ours[stage]}"]
    assert lines == expected
    assert (name, stock) == ("MegatronSFTTrainer", "stock setup")


@pytest.mark.parametrize(
    ("made", "keys", "message"),
    [
        ("sft", {}, None),
        ("odc_sft", {"comm_backend": "odc_pad"}, None),
        (None, {"comm_backend": "odc_pad", "trainer_class": "Flux"}, "comm_backend: odc_pad is set, but trainer_class: Flux leads"),
        (None, {"comm_backend": "odc_pad", "stage": "mlperf_pretrain"}, "but stage: mlperf_pretrain leads"),
    ],
)
def test_a_trainer_that_would_ignore_comm_backend_ends_the_job(
    run: Run, made: str | None, keys: dict[str, str], message: str | None
) -> None:
    result = run(
        REGISTERED
        + f"""
from primus.core.patches import PATCHES
keys = {keys!r}
if {made!r} is not None:
    make({made!r}, **keys)
backend, phase, handler = PATCHES["primus_odc.comm_backend_is_used"]
assert (backend, phase) == ("megatron", "setup")
handler(SimpleNamespace(extra={{"backend_args": SimpleNamespace(**keys)}}))
print("went on")
"""
    )
    assert (result.stdout == "went on\n") == (message is None), result.stderr
    assert message is None or message in result.stderr


@pytest.mark.parametrize("key", ["comm_backnd", "com_backend", "comm_backends", "comm-backend"])
def test_a_misspelt_key_is_refused_in_stages_of_primus_too(run: Run, key: str) -> None:
    result = run(REGISTERED + f"make('sft', **{{{key!r}: 'odc_nopad'}})")
    assert result.returncode == 1
    assert f"{key} is not known, did you mean 'comm_backend'?" in result.stderr


@pytest.mark.parametrize("how", ["module", "script"])
@pytest.mark.parametrize("found", ["path", "variable"])
def test_launcher_runs_primus_with_the_plugin(run: Run, checkout: Path, how: str, found: str) -> None:
    script = run("-m", "primus_odc.primus.launch", "--path").stdout.strip()
    words = ["-m", "primus_odc.primus.launch"] if how == "module" else [script]
    elsewhere = (str(ROOT),)
    variables = {"PRIMUS_PATH": str(checkout)} if found == "variable" else {}
    result = run(*words, "train", "sft", path=() if found == "path" else elsewhere, **variables)
    assert (result.returncode, result.stdout) == (7, "PRIMUS ['train', 'sft'] 1\n"), result.stderr


@pytest.mark.parametrize(
    ("variables", "message"), [({}, "PRIMUS_PATH is not set"), ({"PRIMUS_PATH": "/none"}, "PRIMUS_PATH=/none is no checkout of Primus")]
)
def test_launcher_says_what_is_missing(run: Run, checkout: Path, variables: dict[str, str], message: str) -> None:
    for file in sorted(checkout.glob("primus/**/*.py")):
        file.unlink()
    (checkout / "primus").rename(checkout / "away")
    result = run("-m", "primus_odc.primus.launch", "train", path=(str(ROOT),), **variables)
    assert result.returncode == 2
    assert message in result.stderr
