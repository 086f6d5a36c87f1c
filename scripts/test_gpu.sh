#!/usr/bin/env bash
# The GPU tests on this machine's GPUs, NVIDIA or AMD, with the Python at hand; installs nothing. It needs torch for the device,
# megatron-core, pytest, pytest-timeout and hypothesis there, and runs several tests at once where pytest-xdist is.
#   bash scripts/test_gpu.sh [words for pytest]     for example -k test_engine
#   PYTHON        interpreter (default: python, else python3)
#   JOBS          tests at once (default: 4 with pytest-xdist)
#   SHARE_GPUS=1  lets ranks share GPUs where a test needs more than there are; by default such tests are skipped
#   OUT           folder for the logs (default: build/test-gpu)
# The kernels for several nodes have scripts/test_shmem.sh.
set -euo pipefail

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

cd -- "$ODC_ROOT"
python=$(find_python)
out=${OUT:-build/test-gpu}
mkdir -p -- "$out"
# No test uses NVLink multicast, and a machine that shares its switch may forbid it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=1

"$python" - <<'TEXT' || die "$python has no torch that sees a GPU, or lacks what the tests need: set PYTHON"
import importlib.util, sys
missing = [name for name in ("torch", "megatron.core", "pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing: {', '.join(missing)}")
import torch
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
if not names:
    sys.exit("torch sees no GPU")
kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
print(f"torch {torch.__version__}, {kind}, {len(names)} x {names[0]}", flush=True)
TEXT
several=()
if "$python" -c 'import xdist' 2>/dev/null; then several=(-n "${JOBS:-4}"); fi

status=0
# part NAME WORDS...: those tests, their log and their summary.
part() {
    local name=$1 ended=0
    shift
    printf '=== %s (%s)\n' "$name" "$out/$name.log"
    "$python" -m pytest -v -rs --durations=10 "$@" >"$out/$name.log" 2>&1 || ended=$?
    grep -E '^(FAILED|ERROR|SKIPPED)|^E   |(passed|failed|skipped|error).* in [0-9.]+s' "$out/$name.log" || tail -n 20 "$out/$name.log"
    # 5: the words for pytest chose none of this part.
    ((ended == 0 || ended == 5)) || status=1
}

shmem=(--ignore tests/gpu/test_shmem_kernels.py --ignore tests/gpu/test_shmem_engine.py)
# These two look at the memory and the time of whole devices, so nothing runs beside them.
part alone tests/gpu/test_memory.py tests/gpu/test_overlap.py "$@"
part together "${several[@]}" tests/gpu "${shmem[@]}" --ignore tests/gpu/test_memory.py --ignore tests/gpu/test_overlap.py "$@"
exit "$status"
