#!/usr/bin/env bash
# The arms in the real Primus on this machine's GPUs, beside `primus-odc bench train` on the same minibatches.
#   bash scripts/primus_gpu.sh FOLDER     FOLDER/primus/summary.md has the tables
#   PRIMUS_PATH          a checkout of AMD-AGI/Primus
#   MEGATRON_PATH        a checkout of Megatron-LM at the commit Primus pins (default: third_party/Megatron-LM of Primus)
#   SAMPLES, CAP, MINIBATCHES, SHAPE, NPROC  samples a rank (2), tokens of a microbatch (32768), minibatches (6), model, ranks (all GPUs)
#   BENCH_BUDGET_S, ARM_TIMEOUT_S            limits for bench train (300) and for each arm in Primus (600)
#   DEVICE=cpu SCRIPT=FILE.py                without GPUs, Primus started by FILE.py (tests/primus/cpu_primus.py)
# Megatron's own layers are trained, so neither TransformerEngine nor Apex is needed. Nothing is installed.
set -euo pipefail

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

(($# == 1)) || die "usage: bash scripts/primus_gpu.sh FOLDER"
[[ -n ${PRIMUS_PATH:-} ]] || die "PRIMUS_PATH is not set: it names a checkout of AMD-AGI/Primus"
export PRIMUS_PATH MEGATRON_PATH=${MEGATRON_PATH:-$PRIMUS_PATH/third_party/Megatron-LM}
[[ -d $MEGATRON_PATH/megatron/core ]] || die "MEGATRON_PATH=$MEGATRON_PATH is no checkout of Megatron-LM"
python=$(find_python)
device=${DEVICE:-cuda}
nproc=${NPROC:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}
arms=(nccl_pad odc_nopad odc_nopad:resident odc_pad)
both=(--arms "${arms[@]}" --shape "${SHAPE:-qwen2-1.5b}" --minibatches "${MINIBATCHES:-6}" --device "$device" --nproc "$nproc")
optimizer=local
[[ $device == cpu ]] || optimizer=graph
mkdir -p -- "$1"
folder=$(cd -- "$1" && pwd)

# The same Megatron for both.
PYTHONPATH=$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH} "$python" -m primus_odc bench train "${both[@]}" --points "${SAMPLES:-2}:${CAP:-32768}" \
    --optimizer "$optimizer" --budget-s "${BENCH_BUDGET_S:-300}" --out "$folder/bench.json"
"$python" -m primus_odc bench primus "${both[@]}" --samples-per-rank "${SAMPLES:-2}" --cap "${CAP:-32768}" \
    ${SCRIPT:+--script "$SCRIPT"} --timeout-s "${ARM_TIMEOUT_S:-600}" --beside "$folder/bench.json" --out "$folder/primus"
runs=$folder/primus/runs/primus_odc/bench
for arm in odc_pad odc_nopad odc_nopad-resident; do
    "$python" -m primus_odc compare --from-logs "$runs/nccl_pad" "$runs/$arm" --output "$folder/compare-$arm"
done
