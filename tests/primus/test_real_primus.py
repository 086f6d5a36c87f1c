"""The plugin in the real Primus, with the Megatron-LM it pins, on 1 to 3 CPU ranks over gloo. Run by scripts/primus_tests.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_odc.data.stream import MinibatchStream
from primus_odc.report.logs import StepLog, compare_logs
from tests.primus.real_primus import PRESETS as PRESET_FOLDER
from tests.primus.real_primus import Job, Primus, native_metrics

CLOSE = 1e-4
ARMS = ("nccl_pad", "odc_pad", "odc_nopad")
PRESETS = {"sft": "tiny_sft.yaml", "pretrain": "tiny_pretrain.yaml"}

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("PRIMUS_PATH") or not os.environ.get("MEGATRON_PATH"),
        reason="needs PRIMUS_PATH and MEGATRON_PATH, checkouts of Primus and of the Megatron-LM it pins: bash scripts/primus_tests.sh",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def primus(tmp_path_factory: pytest.TempPathFactory) -> Primus:
    megatron = Path(os.environ["MEGATRON_PATH"]).resolve()
    folder = tmp_path_factory.mktemp("primus")
    helpers, workspace = folder / "helpers", folder / "workspace"
    helpers.mkdir()
    workspace.mkdir()
    pybind11 = pytest.importorskip("pybind11")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    source = megatron / "megatron" / "core" / "datasets" / "helpers.cpp"
    target = helpers / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-O1", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(target)], check=True, timeout=300)
    return Primus(path=Path(os.environ["PRIMUS_PATH"]).resolve(), megatron=megatron, helpers=helpers, workspace=workspace)


@pytest.fixture(scope="module")
def trained(primus: Primus) -> Callable[[str, int, str], Job]:
    """The run of a preset on so many ranks in an arm; each is run once."""
    jobs: dict[tuple[str, int, str], Job] = {}

    def get(kind: str, ranks: int, arm: str) -> Job:
        key = (kind, ranks, arm)
        if key not in jobs:
            jobs[key] = primus.run(ranks, PRESETS[kind], name=f"{kind}{ranks}", arm=arm)
        return jobs[key]

    return get


Trained = Callable[[str, int, str], Job]


def require_close(one: StepLog, other: StepLog) -> None:
    assert len(one.steps) == len(other.steps) == 10
    for a, b in zip(one.steps, other.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=CLOSE)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=CLOSE)


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_as_one_rank_does(trained: Trained, kind: str, ranks: int, arm: str) -> None:
    job = trained(kind, ranks, arm)
    require_close(job.log(), trained(kind, 1, "nccl_pad").log())
    assert f"all {ranks} ranks train in arm {arm} on the same first minibatch" in job.output
    assert ("transport host" in job.output) == (arm != "nccl_pad")


def test_pretraining_is_what_primus_trains_without_the_plugin(primus: Primus, trained: Trained) -> None:
    """All samples have equally many targets, so the mean of means of Primus' own objective on one rank is our objective."""
    words = ("--stage", "pretrain", "--comm_backend", "null", "--calculate_per_token_loss", "false", "--dataloader_type", "single")
    job = primus.run(1, PRESETS["pretrain"], *words, name="native", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "primus_odc.py" not in job.printed()
    ours = trained("pretrain", 2, "odc_nopad").log().steps
    native = native_metrics(job)
    assert len(native) == len(ours) == 10
    for (loss, norm), step in zip(native, ours, strict=True):
        assert float(loss) == pytest.approx(step.loss, rel=CLOSE)
        assert float(norm) == pytest.approx(step.grad_norm, rel=2e-3)  # printed with three decimals


@pytest.mark.parametrize("ranks", [2, 3])
def test_odc_nopad_runs_unequal_counts_and_the_log_says_so(trained: Trained, ranks: int) -> None:
    counts = {arm: [step.microbatches for step in trained("sft", ranks, arm).log().steps] for arm in ARMS}
    assert counts["nccl_pad"] == counts["odc_pad"]
    assert all(len(set(step)) == 1 for step in counts["nccl_pad"])
    unequal = [step for step in counts["odc_nopad"] if len(set(step)) > 1]
    assert unequal
    output = trained("sft", ranks, "odc_nopad").output
    assert all(f"microbatches a rank {min(step)} to {max(step)} {step}" in output for step in unequal)


def test_two_runs_can_be_compared_from_their_logs(trained: Trained) -> None:
    result = compare_logs(trained("sft", 2, "nccl_pad").folder, trained("sft", 2, "odc_nopad").folder)
    assert [arm.arm for arm in result.arms] == ["nccl_pad", "odc_nopad"]


def test_evaluation_is_the_same_in_every_arm(trained: Trained) -> None:
    losses = []
    for arm in ARMS:
        lines = [line for line in trained("sft", 2, arm).printed().splitlines() if "validation loss at iteration 10" in line]
        losses.append(float(lines[0].partition("lm loss value: ")[2].split()[0]))
    assert losses == pytest.approx([losses[0]] * len(ARMS), rel=CLOSE)


REFUSED = (
    ("--use_torch_fsdp2", "false", "use_torch_fsdp2 is false; set it to true"),
    ("--use_distributed_optimizer", "true", "use_distributed_optimizer: true is not possible with comm_backend"),
    ("--context_parallel_size", "2", "context_parallel_size: 2 is not possible with comm_backend"),
    ("--comm_backend", "odc_nopd", "did you mean 'odc_nopad'"),
    ("--enable_odc", "true", "keys of Primus' in-tree ODC are replaced (old -> new): enable_odc: True -> comm_backend"),
)


def test_refusals_stop_all_ranks_with_every_reason(primus: Primus) -> None:
    words = [word for key, value, _ in REFUSED for word in (key, value)]
    job = primus.run(2, PRESETS["sft"], *words, name="refused", timeout_s=120)
    assert job.code != 0
    for _, _, message in REFUSED:
        assert message in job.output
    assert "training ..." not in job.output and "step 1/" not in job.output


def test_patches_that_are_switched_off_are_refused(primus: Primus) -> None:
    job = primus.run(2, PRESETS["sft"], name="unpatched", PRIMUS_PATCHES="megatron.fsdp.torch_fsdp2")
    assert job.code != 0
    assert "PRIMUS_PATCHES=megatron.fsdp.torch_fsdp2 switches off megatron.args.iterations_to_skip_default" in job.output


def test_without_the_plugin_primus_stops(primus: Primus) -> None:
    job = primus.run(2, PRESETS["sft"], name="missing", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert job.code != 0
    assert "trainer not registered" in job.output
    assert "step 1/" not in job.output


def test_the_launcher_brings_the_plugin_where_entry_points_are_off(primus: Primus) -> None:
    words = ("--train_iters", "1", "--lr_warmup_iters", "0", "--eval_iters", "0")
    job = primus.run(2, PRESETS["sft"], *words, name="launched", TORCH_DEVICE_BACKEND_AUTOLOAD="0", LAUNCHER="primus_odc.primus.launch")
    assert len(job.log().steps) == 1


@pytest.mark.parametrize("stage", ["pretrain"])
def test_comm_backend_unset_is_the_same_training_as_without_the_plugin(primus: Primus, stage: str) -> None:
    words = ("--stage", stage, "--comm_backend", "null", "--calculate_per_token_loss", "false", "--train_iters", "4", "--eval_iters", "0")
    jobs = [primus.run(2, PRESETS[stage], *words, name=f"unset{auto}", TORCH_DEVICE_BACKEND_AUTOLOAD=auto) for auto in ("0", "1")]
    assert native_metrics(jobs[0]) == native_metrics(jobs[1])
    assert len(native_metrics(jobs[0])) == 4


DOCKER = """#!/usr/bin/env bash
# Stands in for docker: says how it was called and runs the container's command here.
[[ ${1:-} == run ]] || exit 0
while (($#)) && [[ $1 != IMAGE ]]; do echo "DOCKER $1"; shift; done
shift
exec "$@"
"""
CONTAINER = """container:
  options:
    image: "IMAGE"
    device:
      - "/dev/null"
"""


def test_a_container_gets_the_plugin_by_a_patch_and_the_words_of_the_experiment(primus: Primus, tmp_path: Path) -> None:
    """Primus' own scripts up to the command that would train; a dry run executes patches."""
    for name, text in (("docker", DOCKER), ("install_odc.sh", "echo INSTALLED in $PWD >&2\n"), ("container.yaml", CONTAINER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PRIMUS")},
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PRIMUS_ODC_PRESETS": str(PRESET_FOLDER),
        "ROCM_HOME": str(tmp_path / "rocm"),
        "PRIMUS_SKIP_VALIDATION": "1",
        "PRIMUS_SKIP_PIP": "1",
        "GPUS_PER_NODE": "2",
    }
    command = ["bash", str(primus.path / "runner" / "primus-cli"), "--config", str(tmp_path / "container.yaml"), "container"]
    command += ["--volume", str(tmp_path), "--", "--dry-run", "--patch", str(tmp_path / "install_odc.sh"), "--env", "ODC_ARM=odc_pad", "--"]
    command += ["train", "posttrain", "--config", str(PRESET_FOLDER / "tiny_sft.yaml")]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    told = result.stdout + result.stderr
    assert result.returncode == 0, told
    assert f"DOCKER --volume\nDOCKER {tmp_path}\n" in told
    assert f"INSTALLED in {primus.path}" in told
    assert "ODC_ARM=odc_pad" in told and f"PRIMUS_ODC_PRESETS={PRESET_FOLDER}" in told
    assert f"primus/cli/main.py train posttrain --config {PRESET_FOLDER / 'tiny_sft.yaml'}" in told


def test_recomputed_layers_change_nothing(primus: Primus, trained: Trained) -> None:
    words = ("--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1")
    log = primus.run(2, PRESETS["sft"], *words, "--train_iters", "3", "--eval_iters", "0", name="recomputed").log()
    for one, other in zip(log.steps, trained("sft", 2, "odc_nopad").log().steps[:3], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)


def test_bf16_agrees_between_the_arms(primus: Primus) -> None:
    words = ("--bf16", "true", "--train_iters", "3", "--eval_iters", "0")
    logs = [primus.run(2, PRESETS["sft"], *words, name="bf16", arm=arm).log() for arm in ("nccl_pad", "odc_nopad")]
    for one, other in zip(logs[0].steps, logs[1].steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)


CHECK_PRESET = """
import sys
from types import SimpleNamespace
from primus_odc.experiment import load_experiment
from primus_odc.primus.refusals import check
params = load_experiment(sys.argv[1]).params
checked = check(SimpleNamespace(**params, world_size=int(sys.argv[2])), "sft", installed=lambda package: True)
print("CHECKED", checked.comm.comm_backend, params["num_layers"])
"""


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("model", "ranks", "layers"), [("1.5B", 8, 28), ("14B", 16, 48)])
def test_presets_of_the_deepseek_models_pass_every_check(primus: Primus, model: str, ranks: int, layers: int, arm: str) -> None:
    preset = PRESET_FOLDER / f"sft_deepseek_r1_distill_qwen_{model}.yaml"
    environment = {**os.environ, "ODC_ARM": arm, "ODC_DATA": "long.jsonl", "ODC_TOKENIZER": "tokenizer", "PYTHONPATH": str(primus.megatron)}
    command = [sys.executable, "-c", CHECK_PRESET, str(preset), str(ranks)]
    result = subprocess.run(command, env=environment, cwd=primus.workspace, capture_output=True, text=True, timeout=200)
    assert f"CHECKED {arm} {layers}\n" in result.stdout, result.stderr


@pytest.mark.timeout(900)
def test_the_benchmark_runs_the_arms_on_the_minibatches_of_bench_train(primus: Primus, tmp_path: Path) -> None:
    """All of it, as scripts/primus_gpu.sh does on GPUs."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PRIMUS", "MASTER", "TORCHELASTIC"))},
        "PRIMUS_PATH": str(primus.path),
        "MEGATRON_PATH": str(primus.megatron),
        "MEGATRON_HELPERS": str(primus.helpers),
        "PYTHON": sys.executable,
        "LAUNCHER": "primus_odc.primus.launch",
        "SCRIPT": str(Path(__file__).parent / "cpu_primus.py"),
        "DEVICE": "cpu",
        "SHAPE": "tiny",
        "MINIBATCHES": "2",
        "NPROC": "2",
    }
    script = Path(__file__).resolve().parents[2] / "scripts" / "primus_gpu.sh"
    result = subprocess.run(["bash", str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    summary = (tmp_path / "primus" / "summary.md").read_text()
    for arm in ("nccl_pad", "odc_pad", "odc_nopad", "odc_nopad:resident"):
        assert f"\n| {arm} | " in summary
    assert summary.count("of bench train's speed-up") == 3
    assert (tmp_path / "compare-odc_nopad" / "result.json").exists()


# SGD without momentum has no state: Megatron cannot read back that of a torch optimizer without TransformerEngine or Apex.
STATELESS: tuple[str, ...] = (
    "--optimizer",
    "sgd",
    "--sgd_momentum",
    "0.0",
    "--lr_decay_style",
    "constant",
    "--lr_warmup_iters",
    "0",
    "--lr",
    "0.05",
)
STATELESS += ("--eval_iters", "0", "--lr_decay_iters", "20")


@pytest.mark.parametrize("arm", ["nccl_pad", "odc_nopad"])
def test_a_run_resumed_twice_is_the_straight_run(primus: Primus, arm: str) -> None:
    straight = primus.run(2, PRESETS["sft"], *STATELESS, "--train_iters", "6", name="straight", arm=arm).log()
    resumed = None
    for iterations in ("2", "4", "6"):
        words = ["--train_iters", iterations, "--save", "x", "--save_interval", "2"]
        if resumed is not None:
            words += ["--load", str(resumed.folder / "checkpoints"), "--no_load_optim", "true"]
        resumed = primus.run(2, PRESETS["sft"], *STATELESS, *words, name="resumed", arm=arm)
        assert resumed.code == 0, resumed.tail()
    assert resumed is not None
    steps = resumed.log().steps
    assert len(steps) == 6
    for one, other in zip(steps, straight.steps, strict=True):
        assert (one.tokens, one.microbatches) == (other.tokens, other.microbatches)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)


def test_skipped_iterations_keep_the_data_in_place(primus: Primus, trained: Trained, tmp_path: Path) -> None:
    config = tmp_path / "skipping_sft.yaml"
    config.write_text(
        f"extends: {PRESET_FOLDER}/tiny_sft.yaml\n"
        "modules: {post_trainer: {overrides: {iterations_to_skip: [1], train_iters: 4, eval_iters: 0}}}\n"
    )
    log = primus.run(2, str(config), name="skipping").log()
    whole = trained("sft", 2, "odc_nopad").log().steps
    assert [step.skipped for step in log.steps] == [False, True, False, False]
    assert [(step.tokens, step.microbatches) for step in log.steps] == [(step.tokens, step.microbatches) for step in whole[:4]]
    assert log.steps[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=CLOSE)


def test_rerun_steps_are_the_same_steps(primus: Primus, trained: Trained) -> None:
    """In this mode Megatron runs the passes of every step twice and compares the losses."""
    job = primus.run(2, PRESETS["pretrain"], "--rerun_mode", "report_determinism_stats", "--eval_iters", "0", name="rerun_pretrain")
    require_close(job.log(), trained("pretrain", 1, "nccl_pad").log())
    assert "Stats on computation determinism in validation calls" in job.printed() + job.output


def masked_dataset(path: Path, unmasked: list[int], samples: int) -> None:
    """Conversations of which only those of ``unmasked`` have a reply."""
    lines = []
    for i in range(samples):
        messages = [{"role": "user", "content": f"question {i} " * (i + 1)}]
        if i in unmasked:
            messages.append({"role": "assistant", "content": f"answer {i} " * (i + 1)})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def test_a_minibatch_without_a_target_is_skipped_for_real(primus: Primus, tmp_path: Path) -> None:
    stream = MinibatchStream(8, 2, 1234)
    minibatches = [stream.next().tolist() for _ in range(4)]
    masked_dataset(tmp_path / "data.jsonl", [i for k, minibatch in enumerate(minibatches) if k != 1 for i in minibatch], 8)
    words: tuple[str, ...] = (
        "--sft_dataset_name",
        str(tmp_path / "data.jsonl"),
        "--sft_conversation_format",
        "messages",
        "--sft_validation_fraction",
        "0.0",
    )
    words += ("--train_iters", "4", "--global_batch_size", "2", "--eval_iters", "0")
    log = primus.run(2, PRESETS["sft"], *words, name="masked").log()
    assert [step.skipped for step in log.steps] == [False, True, False, False]
