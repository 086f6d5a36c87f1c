#!/usr/bin/env bash
# Tests the plugin in the real Primus on CPU ranks; arguments go to pytest.
#   PRIMUS_PATH          a checkout of AMD-AGI/Primus
#   MEGATRON_PATH        a checkout of Megatron-LM at the commit Primus pins (default: third_party/Megatron-LM of Primus)
#   PRIMUS_TEST_TIMEOUT_S  limit for all of it (default 3600)
# Both are read where they are, and nothing is written there. The environment, .venv-primus, is made once.
set -euo pipefail

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

[[ -n ${PRIMUS_PATH:-} ]] || die "PRIMUS_PATH is not set: it names a checkout of AMD-AGI/Primus"
export PRIMUS_PATH MEGATRON_PATH=${MEGATRON_PATH:-$PRIMUS_PATH/third_party/Megatron-LM}
[[ -f $PRIMUS_PATH/primus/cli/main.py ]] || die "PRIMUS_PATH=$PRIMUS_PATH is no checkout of Primus"
[[ -d $MEGATRON_PATH/megatron/training ]] || die "MEGATRON_PATH=$MEGATRON_PATH is no checkout of Megatron-LM"

VENV=$ODC_ROOT/.venv-primus
packages=(numpy pyyaml loguru packaging einops triton pydantic tqdm datasets transformers sentencepiece pybind11 psutil pytest pytest-timeout hypothesis
    'scikit-build-core>=0.10' pathspec)
# What is needed stands in these two files.
if [[ ! -f $VENV/primus-odc-ready || $ODC_ROOT/pyproject.toml -nt $VENV/primus-odc-ready ||
    $ODC_ROOT/scripts/primus_tests.sh -nt $VENV/primus-odc-ready ]]; then
    [[ -x $VENV/bin/python ]] || "$(find_python)" -m venv "$VENV"
    mapfile -t index < <(cpu_index_options "$VENV/bin/python" "$ODC_CPU_TORCH")
    "$VENV/bin/python" -m pip --disable-pip-version-check install "${index[@]}" "torch==$ODC_CPU_TORCH" "${packages[@]}"
    "$VENV/bin/python" -m pip --disable-pip-version-check install --no-build-isolation --no-deps --editable "$ODC_ROOT"
    touch "$VENV/primus-odc-ready"
fi

cd -- "$ODC_ROOT"
export OMP_NUM_THREADS=1
exec timeout --signal=INT --kill-after=30 "${PRIMUS_TEST_TIMEOUT_S:-3600}" "$VENV/bin/python" -m pytest tests/primus/test_real_primus.py tests/doctor/test_real_primus.py "$@"
