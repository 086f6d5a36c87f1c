"""AMD's device code: for which card and GPU, from which files, compiled once. The compiler is made up; the real one runs in
scripts/compile_kernels.sh."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primus_odc.errors import ConfigError, OdcError
from primus_odc.symmetric.shmem import code_object
from primus_odc.symmetric.shmem.code_object import Target, detect_nic

COMPILER = """#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print({version!r})
    sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if {fails!r}:
    sys.exit("kernels.cu:1:1: error: made up")
time.sleep(0.2)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("code")
"""


class Node:
    """A made-up node: a compiler that logs its calls, and a MORI."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.mori = folder / "mori"
        include = self.mori / "_jit-sources" / "include" / "mori" / "shmem"
        include.mkdir(parents=True)
        (include / "shmem.hpp").touch()
        self.set_mori("1.2.4")
        self.set_compiler()

    def set_mori(self, version: str) -> None:
        (self.mori / "_version.py").write_text(f"__version__ = '{version}'\n")

    def set_compiler(self, version: str = "HIP 7", fails: bool = False) -> None:
        self.compiler = self.folder / "hipcc"
        self.compiler.write_text(COMPILER.format(python=sys.executable, log=str(self.log), version=version, fails=fails))
        self.compiler.chmod(0o755)

    def build(self, target: Target) -> Path:
        return code_object.code_object(target, hipcc=str(self.compiler), mori=self.mori, cache=self.folder / "cache")

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    "target, defines",
    [
        (Target("gfx942", "mlx5"), "-DMORI_DEVICE_NIC_MLX5"),
        (Target("gfx950", "bnxt"), "-DMORI_DEVICE_NIC_BNXT"),
        (Target("gfx942", "ionic"), "-DMORI_DEVICE_NIC_IONIC"),
        (Target("gfx950", "ionic", ionic_ccqe=True), "-DMORI_DEVICE_NIC_IONIC -DIONIC_CCQE"),
    ],
)
def test_the_compiler_is_told_gpu_card_and_headers(node: Node, target: Target, defines: str) -> None:
    assert node.build(target).read_text() == "code"
    (call,) = node.calls()
    assert f"--offload-arch={target.arch} {defines} -I{node.mori}/_jit-sources/include -c" in call
    assert "--cuda-device-only" in call and "csrc/kernels.cu" in call


def test_it_is_compiled_once_for_what_went_into_it(node: Node) -> None:
    target = Target("gfx942", "mlx5")
    with ThreadPoolExecutor(4) as pool:  # ranks of one node, at once
        assert len(set(pool.map(node.build, [target] * 4))) == 1
    assert len(node.calls()) == 1
    for change in (lambda: node.set_mori("1.2.5"), lambda: node.set_compiler("HIP 7.1")):
        change()
        node.build(target)
        node.build(target)
    node.build(Target("gfx942", "bnxt"))
    assert len(node.calls()) == 4
    assert not [path for path in (node.folder / "cache").iterdir() if path.suffix not in (".co", ".lock")]


def test_a_process_that_never_ends_its_compilation_is_not_waited_for_for_ever(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = node.build(Target("gfx942", "mlx5"))
    kept.unlink()
    monkeypatch.setattr(code_object, "_LOCK_TIMEOUT_S", 0.3)
    with open(kept.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OdcError, match=r"another process has held .*\.lock for 0\.3 s"):
            node.build(Target("gfx942", "mlx5"))
    assert node.build(Target("gfx942", "mlx5")) == kept


def test_an_error_of_the_compiler_is_shown_and_nothing_is_kept(node: Node) -> None:
    node.set_compiler(fails=True)
    for _ in range(2):
        with pytest.raises(OdcError, match="error: made up"):
            node.build(Target("gfx942", "mlx5"))
    assert len(node.calls()) == 2


def test_a_node_without_compiler_or_headers_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", str(node.folder / "nothing"))
    monkeypatch.setenv("PATH", str(node.folder / "nothing"))
    with pytest.raises(OdcError, match="no hipcc"):
        code_object.find_hipcc()
    monkeypatch.setenv("ROCM_PATH", str(node.folder.parent))
    (node.mori / "_jit-sources" / "include" / "mori" / "shmem" / "shmem.hpp").unlink()
    with pytest.raises(OdcError, match="MORI's headers are not in"):
        node.build(Target("gfx942", "mlx5"))


def cards(folder: Path, vendors: dict[str, str]) -> Path:
    for name, vendor in vendors.items():
        (folder / name / "device").mkdir(parents=True)
        (folder / name / "device" / "vendor").write_text(vendor + "\n")
    return folder


def test_the_card_is_known_by_its_vendor(tmp_path: Path) -> None:
    assert detect_nic(cards(tmp_path / "a", {"mlx5_0": "0x15b3", "mlx5_1": "0x15b3"})) == "mlx5"
    assert detect_nic(cards(tmp_path / "b", {"rdma0": "0x14e4"})) == "bnxt"
    assert detect_nic(cards(tmp_path / "c", {"rdma0": "0x1dd8", "efa_0": "0x1d0f"})) == "ionic"


def test_no_card_or_several_kinds_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no RDMA device of a known vendor.*odc\.nic"):
        detect_nic(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"mlx5: mlx5_0; bnxt: rdma1, rdma2.*MORI_RDMA_DEVICES"):
        detect_nic(cards(tmp_path / "both", {"mlx5_0": "0x15b3", "rdma1": "0x14e4", "rdma2": "0x14e4"}))


def test_other_cards_and_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="gfx942 and gfx950"):
        Target("gfx90a", "mlx5")
    with pytest.raises(ConfigError, match=r"odc\.nic: 'efa'"):
        Target("gfx942", "efa")


def test_the_command_for_images(node: Node) -> None:
    module = ["-m", "primus_odc.symmetric.shmem.code_object"]
    where = ["--hipcc", str(node.compiler), "--mori", str(node.mori), "--cache", str(node.folder / "cache")]
    done = subprocess.run(
        [sys.executable, *module, "--arch", "gfx950", "--nic", "bnxt", *where], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_text() == "code"
