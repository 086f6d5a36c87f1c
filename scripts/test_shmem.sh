#!/usr/bin/env bash
# Builds the kernels for the GPUs of this machine into the checkout and tries them: tests of the kernels and of the engine on them,
# compute-sanitizer (NVIDIA), comparison with NCCL or RCCL.
# Needs CMake and a Python with torch for the GPUs, pybind11 and pytest; on NVIDIA nvcc (NVSHMEM comes with torch), on AMD ROCm 7 and
# amd-mori. Installs nothing. On AMD none of it has ever run.
#   scripts/test_shmem.sh [build|tests|engine|sanitizer|bench]...      default: all of them
# Read from the environment: PYTHON (default: python, else python3), OUT (folder for logs and figures, default build/shmem), SANITIZER_TOOL
# (default memcheck), SHARE_GPUS=1 (ranks share GPUs where a test needs more than there are; by default it is skipped).
set -euo pipefail

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

cd -- "$ODC_ROOT"
python=$(find_python)
out=${OUT:-build/shmem}
mkdir -p -- "$out"
# The kernels do not use NVLink multicast, and a machine that shares its switch may forbid it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 OMP_NUM_THREADS=1
status=0
library=$("$python" -c 'import torch; print("mori" if torch.version.hip else "nvshmem")')

build() {
    cmake -S . -B build/shmem-cmake -DPRIMUS_ODC_BUILD="$library" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
        -DCMAKE_INSTALL_PREFIX="$PWD" >"$out/build.log" 2>&1 &&
        cmake --build build/shmem-cmake --parallel >>"$out/build.log" 2>&1 &&
        cmake --install build/shmem-cmake >>"$out/build.log" 2>&1 || {
        tail -n 40 "$out/build.log"
        exit 1
    }
}

tests() { "$python" -m pytest tests/gpu/test_shmem_kernels.py -v --durations=0; }

# With GPUs of this machine as nodes; what is printed says how much of the settle was hidden, and what the library takes.
engine() { "$python" -m pytest tests/gpu/test_shmem_engine.py -v -s --durations=0; }

# NVSHMEM probes addresses when it starts, which the driver answers with errors that it expects: API errors are not reported.
sanitizer() {
    if [[ $library == mori ]]; then
        echo 'compute-sanitizer is for NVIDIA: nothing is run'
        return
    fi
    compute-sanitizer --tool "${SANITIZER_TOOL:-memcheck}" --target-processes all --report-api-errors no \
        --error-exitcode 9 --log-file "$out/sanitizer.log" "$python" -m pytest tests/gpu/test_shmem_kernels.py -v -k a_little_of_each || {
        tail -n 40 "$out/sanitizer.log"
        return 1
    }
    grep -h SUMMARY "$out/sanitizer.log"
}

bench() {
    local gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    "$python" -m torch.distributed.run --nproc-per-node "$gpus" scripts/bench_shmem.py "$out/bench.json"
}

for part in "${@:-build tests engine sanitizer bench}"; do
    for name in $part; do
        printf '=== %s\n' "$name"
        started=$SECONDS
        "$name" || { status=1 && printf 'FAILED '; }
        printf '%s: %s s\n' "$name" "$((SECONDS - started))"
    done
done
exit "$status"
