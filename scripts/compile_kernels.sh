#!/usr/bin/env bash
# Compiles everything under csrc/ on a machine without a GPU, without ROCm:
#   * the kernels for gfx942 and gfx950 with each kind of network card, by the very code that compiles them on a node
#   * the host half for MORI, as `PRIMUS_ODC_BUILD=mori pip install .` does, and the sources in its wheel
#   * kernels and host half for NVSHMEM and sm_90, as `PRIMUS_ODC_BUILD=nvshmem pip install .` does, with the nvcc at hand; the module is
#     loaded, which needs no GPU
# Packages are downloaded once, into build/. Ends with "N passed, M failed"; exit status 1 if any failed. No kernel is run: there is nothing
# to run it on. Read from the environment: PYTHON (3.10 or later, with pip; default python3).
set -euo pipefail

NVSHMEM=3.4.5 # what torch 2.11 to 2.13 for CUDA 13 bring
CUDA_RUNTIME='13.0.*'
COMPILE_TIMEOUT_S=240
DOWNLOAD_TIMEOUT_S=600

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$root"
python=$(command -v -- "${PYTHON:-python3}")
[[ $python == /* ]] || python=$root/$python
hip=$root/build/toolchain
nvshmem=$root/build/nvshmem-$NVSHMEM
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
passed=0
failed=0

check() { # NAME COMMAND...
    local name=$1 started=$SECONDS status=0
    shift
    timeout --kill-after=10 "$COMPILE_TIMEOUT_S" "$@" >"$scratch/log" 2>&1 || status=$?
    if ((status == 0)); then
        passed=$((passed + 1))
        printf 'passed  %s (%s s)\n' "$name" "$((SECONDS - started))"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s (exit status %s, %s s)\n' "$name" "$status" "$((SECONDS - started))"
        tail -n 60 "$scratch/log"
    fi
}

get_nvshmem() {
    [[ ! -f $nvshmem/nvidia/nvshmem/include/nvshmem.h || ! -d $nvshmem/nvidia/cu13/lib ]] || return 0
    rm -rf -- "$nvshmem"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$nvshmem.part" "nvidia-nvshmem-cu13==$NVSHMEM" \
        "nvidia-cuda-runtime==$CUDA_RUNTIME"
    mv -- "$nvshmem.part" "$nvshmem"
}

# wheel LIBRARY MEMBER...: a wheel with the kernels for it, which has these members.
wheel() {
    local library=$1
    shift
    rm -rf -- "$scratch/wheel"
    PRIMUS_ODC_BUILD=$library "$python" -m pip --disable-pip-version-check wheel --no-deps --wheel-dir "$scratch/wheel" -v .
    "$python" - "$scratch"/wheel/*.whl "$@" <<'PYTHON_END'
import fnmatch, sys, zipfile
wheel, *wanted = sys.argv[1:]
names = zipfile.ZipFile(wheel).namelist()
missing = [pattern for pattern in wanted if not fnmatch.filter(names, f"primus_odc/symmetric/shmem/{pattern}")]
sys.exit(f"{wheel} lacks {', '.join(missing)}" if missing else 0)
PYTHON_END
}

# The module of the wheel made last, installed beside the libraries it looks for, as in a site-packages folder.
load_nvshmem() {
    mkdir -p -- "$scratch/site"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$scratch/site" "$scratch"/wheel/*.whl
    ln -s -- "$nvshmem/nvidia" "$scratch/site/nvidia"
    cd -- "$scratch/site" # not the checkout, which has the package too
    # -S: an editable installation of the checkout would come before this folder.
    env -u LD_LIBRARY_PATH "$python" -S - "$NVSHMEM" <<'PYTHON_END'
import sys
import primus_odc.symmetric.shmem._nvshmem as module
versions = module.built_version(), module.loaded_version()
sys.exit(0 if versions == (sys.argv[1], sys.argv[1]) else f"built against and loaded: {versions}")
PYTHON_END
}

code_object() { # ARCH NIC CCQE
    # -S: this checkout's sources, whichever is installed.
    "$python" -S -m primus_odc.symmetric.shmem.code_object --arch "$1" --nic "$2" --ionic-ccqe "$3" --hipcc "$hip/rocm/bin/hipcc" \
        --mori "$hip/mori" --cache "$scratch/cache"
}

export PYTHON=$python MORI_HOME=$hip/mori ROCM_PATH=$hip/rocm NVSHMEM_HOME=$nvshmem/nvidia/nvshmem PRIMUS_ODC_ARCH=90
export root hip nvshmem NVSHMEM CUDA_RUNTIME python scratch
export -f get_nvshmem wheel load_nvshmem code_object

timeout --kill-after=10 "$DOWNLOAD_TIMEOUT_S" bash "$root/scripts/hip_toolchain.sh" "$hip"
timeout --kill-after=10 "$DOWNLOAD_TIMEOUT_S" bash -ec get_nvshmem

for arch in gfx942 gfx950; do
    for card in 'mlx5 off' 'bnxt off' 'ionic off' 'ionic on'; do
        check "kernels, $arch, ${card/% off/}" bash -ec "code_object $arch $card"
    done
done
check 'wheel for MORI' bash -ec "wheel mori '_mori.*.so' csrc/kernels.cu csrc/portable.h csrc/copy.h csrc/arguments.h"
check 'wheel for NVSHMEM, sm_90' bash -ec "wheel nvshmem '_nvshmem.*.so'"
check 'module for NVSHMEM loads' bash -ec load_nvshmem

printf '%s passed, %s failed\n' "$passed" "$failed"
((failed == 0))
