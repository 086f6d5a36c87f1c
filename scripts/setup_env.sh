# shellcheck shell=bash
# The project's own virtual environment, made once and then only checked.
#
# Source this file; `setup_env EXTRAS` (a comma-separated list of the extras in pyproject.toml) returns with VENV set to an environment
# that has the package and those extras. Two files inside it say what it is:
#   primus-odc-env        interpreter, device kind and torch it was made for; another value means it is made anew
#   primus-odc-installed  digest of pyproject.toml and the extras installed; written last, removed before pip runs
# A `.venv` without the first file is somebody else's and is refused. Starts at the same time wait for each other (flock).
#
# Read from the environment: PYTHON (interpreter to build on), TORCH (exact torch version, in a .venv-torch-VERSION of its own),
# ODC_DEVICE (cpu, cuda or rocm where the detection is wrong).

ODC_ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
ODC_CPU_TORCH=2.13.0                               # the newest tested release; the range stands in pyproject.toml
ODC_CPU_INDEX=https://download.pytorch.org/whl/cpu # PyTorch's own wheels without CUDA libraries
ODC_LOCK_TIMEOUT_S=1800

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

say() { printf '== %s\n' "$*" >&2; }

# The interpreter the user means: $PYTHON, else python, else python3.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python python3; do
        if command -v -- "$candidate" >/dev/null 2>&1; then
            command -v -- "$candidate"
            return
        fi
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a program"
    done
    die "no python or python3 on PATH: set PYTHON to the interpreter to use"
}

# cpu, cuda or rocm. A ROCm image counts as ROCm without a GPU too: its torch cannot be had again from PyPI.
detect_device() {
    case ${ODC_DEVICE:-} in
        cpu | cuda | rocm) echo "$ODC_DEVICE" && return ;;
        '') ;;
        *) die "ODC_DEVICE=$ODC_DEVICE is not one of cpu, cuda, rocm" ;;
    esac
    if [[ -e /dev/kfd ]]; then
        echo rocm
    elif compgen -G '/dev/nvidia[0-9]*' >/dev/null || timeout 30 nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    elif [[ -d /opt/rocm ]]; then
        echo rocm
    else
        echo cpu
    fi
}

# Prints the pip options that make a CPU build of torch $2 available to the pip of interpreter $1. pip asks every index for every
# package and retries for seconds where one does not answer, so PyTorch's index is named only if it answers and is needed.
cpu_index_options() {
    local pip=("$1" -m pip --disable-pip-version-check)
    if offers_cpu_build "$2" "${pip[@]}" index versions torch; then
        return
    fi
    if offers_cpu_build "$2" "${pip[@]}" --retries 0 --timeout 10 index versions torch --extra-index-url "$ODC_CPU_INDEX"; then
        printf '%s\n' --extra-index-url "$ODC_CPU_INDEX"
        return
    fi
    say "no source offers a CPU build of torch $2: the default build is installed, which may bring several GB of CUDA libraries"
}

offers_cpu_build() {
    local version=$1 listing
    shift
    listing=$(timeout 60 "$@" 2>/dev/null) || return 1
    [[ $listing == *[[:space:]]"$version+cpu"[[:space:],]* || $listing == *[[:space:]]"$version+cpu" ]]
}

# Prints the version of torch, or on stderr why it is not one of the tested releases.
usable_torch='
import sys
from primus_odc import errors, versions
try:
    versions.require_torch()
except errors.VersionError as error:
    sys.exit(str(error).partition("; install")[0])
import torch
print(torch.__version__)
'

# On ROCm: makes the torch of interpreter $1 visible in $VENV and prints the pip options that pin it to what it is.
reuse_torch() {
    local version
    if ! version=$(PYTHONPATH=$ODC_ROOT${PYTHONPATH:+:$PYTHONPATH} "$1" -c "$usable_torch"); then
        die "this is a ROCm machine and the torch of $1 cannot be used (see above). A ROCm build of torch is never installed or replaced" \
            "here: use the interpreter that has one (PYTHON=...), or ODC_DEVICE=cpu to run on the CPU"
    fi
    if [[ -n ${TORCH:-} && ${version%%+*} != "$TORCH" ]]; then
        die "TORCH=$TORCH was asked for, but torch on a ROCm machine is never replaced and $1 has $version"
    fi
    # A venv made from a venv does not see it, with --system-site-packages neither; a .pth file works for both.
    "$1" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
        >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/primus-odc-base.pth"
    printf 'torch==%s\n' "$version" >"$VENV/primus-odc-constraint.txt"
    printf '%s\n' --constraint "$VENV/primus-odc-constraint.txt"
}

# setup_env EXTRAS: see the head of this file.
setup_env() {
    local extras=$1 python device version description digest
    if [[ -n ${TORCH:-} && ! $TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
        die "TORCH=$TORCH is not a release such as 2.12.0"
    fi
    VENV=$ODC_ROOT/.venv${TORCH:+-torch-$TORCH}
    python=$(find_python)
    device=$(detect_device)
    version=$("$python" -c 'import platform, sys; print(platform.python_version()); sys.exit(sys.version_info < (3, 10))') ||
        die "$python is Python ${version:-(does not start)}: 3.10 or newer is needed, name one with PYTHON=..."
    description="python $version, $device, torch ${TORCH:-default}, in $ODC_ROOT"
    digest=$(sha256sum "$ODC_ROOT/pyproject.toml" | cut -d ' ' -f 1)

    if ! is_complete "$description" "$digest" "$extras"; then
        exec 9>"$VENV.lock"
        if ! flock --nonblock 9; then
            say "another set-up of $VENV is running: waiting for it"
            flock --timeout "$ODC_LOCK_TIMEOUT_S" 9 || die "another set-up of $VENV has not ended in $ODC_LOCK_TIMEOUT_S s"
        fi
        if ! is_complete "$description" "$digest" "$extras"; then
            install_env "$python" "$device" "$description" "$digest" "$extras"
        fi
        exec 9>&-
    fi
}

# Whether $VENV was made for description $1, from a pyproject.toml with digest $2, with all extras of $3.
is_complete() {
    local digest installed extra
    [[ -x $VENV/bin/python && -f $VENV/primus-odc-installed && $(cat "$VENV/primus-odc-env" 2>/dev/null) == "$1" ]] || return 1
    read -r digest installed <"$VENV/primus-odc-installed" || return 1
    [[ $digest == "$2" ]] || return 1
    for extra in ${3//,/ }; do
        [[ ,$installed, == *,$extra,* ]] || return 1
    done
}

install_env() {
    local python=$1 device=$2 description=$3 digest=$4 extras=$5 options=() option pinned='' installed='' started=$SECONDS
    if [[ -e $VENV && ! -f $VENV/primus-odc-env ]]; then
        die "$VENV exists and was not made by this script: move it away first"
    fi
    if [[ $(cat "$VENV/primus-odc-env" 2>/dev/null) != "$description" ]] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV ($description)"
        rm -rf -- "$VENV"
        mkdir -- "$VENV"
        printf '%s\n' "$description" >"$VENV/primus-odc-env"
        "$python" -m venv "$VENV"
    fi
    # What an earlier call installed for other extras stays.
    if [[ -f $VENV/primus-odc-installed ]]; then
        read -r _ installed <"$VENV/primus-odc-installed" || true
        rm -f -- "$VENV/primus-odc-installed"
        extras=$(tr ',' '\n' <<<"$extras,$installed" | sed '/^$/d' | sort -u | paste -sd ,)
    fi

    case $device in
        rocm) pinned=$(reuse_torch "$python") ;;
        cuda) pinned=${TORCH:+torch==$TORCH} ;;
        cpu)
            pinned=$(cpu_index_options "$VENV/bin/python" "${TORCH:-$ODC_CPU_TORCH}")
            pinned+=$'\n'torch==${TORCH:-$ODC_CPU_TORCH}
            ;;
    esac
    while read -r option; do
        [[ -z $option ]] || options+=("$option")
    done <<<"$pinned"

    say "installing primus_odc[$extras]${options[*]:+ with ${options[*]}} into $VENV"
    "$VENV/bin/python" -m pip --disable-pip-version-check install "${options[@]}" --editable "${ODC_ROOT}[$extras]"
    check_torch "$device"
    printf '%s %s\n' "$digest" "$extras" >"$VENV/primus-odc-installed"
    say "environment ready in $((SECONDS - started)) s"
}

# A torch of the wrong kind would only show up later, as a run on the wrong device.
check_torch() {
    local version kind
    version=$("$VENV/bin/python" -c 'import torch; print(torch.__version__, "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu")')
    kind=${version##* }
    say "torch ${version% *} ($kind build)"
    [[ $1 == cpu || $kind == "$1" ]] || die "this is a $1 machine, but the torch in $VENV is a $kind build: install a $1 build of it," \
        "or set ODC_DEVICE=$kind to use it as it is"
}
