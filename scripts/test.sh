#!/usr/bin/env bash
# Runs the tests in the project's own environment (scripts/setup_env.sh); arguments go to pytest.
#   TORCH=2.12.0     on another torch, in a .venv-torch-2.12.0 of its own
#   TEST_WORKERS     test files run side by side (default 2: most tests wait for processes of theirs)
#   TEST_TIMEOUT_S   limit for the whole suite (default 1200): past it the tests and what they started are ended, exit status 124
set -euo pipefail

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env standalone,tokenizers,dev
cd -- "$ODC_ROOT"

# One thread a process: the tests start several processes each.
export OMP_NUM_THREADS=1
# timeout makes a process group of its own and signals all of it, so no worker outlives the limit.
exec timeout --signal=INT --kill-after=30 "${TEST_TIMEOUT_S:-1200}" "$VENV/bin/python" -m pytest --numprocesses "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
