#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/run_odc.sh
       bash scripts/run_odc.sh CONFIG.yaml [--KEY VALUE ...]

Without arguments: makes .venv in the checkout once, installs the package there (with a CPU build of torch where there is neither a
CUDA nor a ROCm device) and runs the quickstart comparison, configs/quickstart.yaml; the result is output/compare/index.html.

With a config: installs nothing and trains with the Python at hand. The words after the config override its keys. With PRIMUS_PATH set,
Primus trains it with the primus_odc plugin, else the standalone trainer. First `primus-odc doctor` looks at the machine and the config;
a problem that it finds ends the launch with status 2.

Environment of a training run, as torchrun knows it:
  GPUS_PER_NODE  processes on this node     (default: the GPUs that torch sees; without any, min(cores, 4) CPU processes)
  NNODES         nodes                      (default: 1)
  NODE_RANK      this node, from 0          (default: 0)
  MASTER_ADDR    host of node 0             (needed with several nodes)
  MASTER_PORT    a free TCP port there      (default: any free port on one node, 29500 on several)
  PRIMUS_PATH    checkout of AMD-AGI/Primus (default: none, the standalone trainer)
  OMP_NUM_THREADS  threads of each process  (default: 1, whatever the number of processes)
  ODC_SKIP_DOCTOR=1  start without looking first

Environment of both:
  PYTHON         interpreter                (default: python, else python3)
Environment of the set-up:
  TORCH          exact torch release, in a .venv-torch-RELEASE of its own
  ODC_DEVICE     cpu, cuda or rocm, where the detection is wrong
TEXT
}

# shellcheck source=scripts/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

# Checks that variable $1 (or its default $2) is a decimal number from $3 to $4 and prints it.
number() {
    local value=${!1:-$2}
    if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < $3 || value > $4)); then
        die "$1=$value is not a number from $3 to $4"
    fi
    echo "$value"
}

quickstart() {
    setup_env standalone,tokenizers
    cd -- "$ODC_ROOT"
    exec "$VENV/bin/python" -m primus_odc compare configs/quickstart.yaml
}

# Prints how many processes suit this machine, or what the interpreter lacks (exit status 3).
probe='
import importlib.util, os, sys
missing = [name for name in ("primus_odc", "torch") if importlib.util.find_spec(name) is None]
if missing:
    print(" and ".join(missing))
    sys.exit(3)
import torch
print(torch.cuda.device_count() or min(len(os.sched_getaffinity(0)), 4))
'

# Prints Primus' word for the trainer module of config $1.
primus_kind() {
    if grep -Eq '^[[:space:]]*pre_trainer[[:space:]]*:' "$1"; then echo pretrain; else echo posttrain; fi
}

launch() {
    local config=$1 python found status=0 processes nodes node_rank port rendezvous job
    [[ -f $config ]] || die "no such config: $config"
    shift
    if [[ -z ${PRIMUS_PATH:-} ]]; then
        job=(primus_odc train "$config")
    else
        [[ -f $PRIMUS_PATH/primus/cli/main.py ]] || die "PRIMUS_PATH=$PRIMUS_PATH is no checkout of Primus"
        # Either word finds either module; the right one names the log's folder.
        job=(primus_odc.primus.launch train "$(primus_kind "$config")" --config "$config")
    fi
    nodes=$(number NNODES 1 1 100000)
    node_rank=$(number NODE_RANK 0 0 $((nodes - 1)))
    python=$(find_python)
    found=$("$python" -c "$probe") || status=$?
    if ((status == 3)); then
        die "$python has no $found, and a run with a config installs nothing. Use the interpreter that has it (PYTHON=...); for the" \
            "environment that 'bash scripts/run_odc.sh' makes: PYTHON=$ODC_ROOT/.venv/bin/python; for the package alone:" \
            "$python -m pip install --no-deps $ODC_ROOT"
    fi
    ((status == 0)) || die "$python cannot import torch (see above)"
    processes=$(number GPUS_PER_NODE "$found" 1 1024)
    if ((nodes > 1)) || [[ -n ${MASTER_PORT:-} || -n ${MASTER_ADDR:-} ]]; then
        ((nodes == 1)) || [[ -n ${MASTER_ADDR:-} ]] || die "NNODES=$nodes needs MASTER_ADDR, the host of node 0"
        port=$(number MASTER_PORT 29500 1 65535)
        rendezvous=(--nnodes "$nodes" --node-rank "$node_rank" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$port")
    else
        # A free port, so that two runs on one host do not meet; the loopback address, because a host name need not resolve.
        rendezvous=(--standalone --local-addr 127.0.0.1)
    fi
    if [[ ${ODC_SKIP_DOCTOR:-} != 1 ]]; then
        # Once and before any rank starts: what is wrong with the machine or the config is told once, without torchrun's report of every
        # process. The limit is for file systems on which imports take minutes.
        "$python" -m primus_odc doctor "$config" --quiet --ranks $((nodes * processes)) --nodes "$nodes" --time-limit 120 "$@" || status=$?
        case $status in 0) ;; 130) exit 130 ;; *) exit 2 ;; esac
    fi
    say "$nodes node(s) with $processes process(es) each, $python${PRIMUS_PATH:+, Primus at $PRIMUS_PATH}"
    # torchrun sets this only where it starts several processes.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$python" -m primus_odc.megatron.launcher "${rendezvous[@]}" --nproc-per-node "$processes" -m "${job[@]}" "$@"
}

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
esac
case ${1:-} in
    '')
        (($# == 0)) || die "the config's name is empty"
        [[ -z ${PRIMUS_PATH:-} ]] || die "PRIMUS_PATH is set, and Primus needs a config; unset PRIMUS_PATH for the quickstart comparison"
        quickstart
        ;;
    -*)
        usage >&2
        die "the first argument is a config, not $1"
        ;;
    *) launch "$@" ;;
esac
