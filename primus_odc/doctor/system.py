"""What the operating system and the container allow: processor, memory, locked memory, /dev/shm, ptrace."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.limits import Check
from primus_odc.errors import OdcError
from primus_odc.symmetric.host import available_memory, require_host_transport

GIB = 2**30
SHM = "/dev/shm"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
LOCKED_BYTES = 2**20
"""More than the control words of any model here: a few hundred bytes a parameter group and rank."""
SHM_BYTES = GIB
"""NCCL and RCCL put buffers between GPUs without P2P into /dev/shm, and data-loader workers their batches; Docker gives it 64 MiB."""
_SUN_PATH = 108  # unix(7)
_LARGEST_PID = 2**22  # proc(5), pid_max


def checks(job: Job, environment: Mapping[str, str]) -> list[Check]:
    """All checks of this file."""
    return [
        Check(name="processor", run=lambda: check_processor(job)),
        Check(name="memory", run=check_memory),
        Check(name="locked memory", run=lambda: check_locked_memory(job)),
        Check(name="/dev/shm", run=check_shm),
        Check(name="temporary folder", run=lambda: check_temporary_folder(environment)),
        Check(name="ptrace", run=check_ptrace),
    ]


def gpu_files() -> list[str]:
    """The device files of GPUs; a machine or container without them has none to use."""
    return [str(path) for path in (Path("/dev/kfd"), *sorted(Path("/dev").glob("nvidia[0-9]*"))) if path.exists()]


def check_processor(job: Job) -> list[Finding]:
    """Order of stores, and ``memfd_create``: every transport keeps its control words in host memory."""
    try:
        require_host_transport()
        descriptor = os.memfd_create("primus_odc_doctor", os.MFD_CLOEXEC)
    except OdcError as error:
        return [Finding(check="processor", severity=job.severity, found=str(error), setting="comm_backend: nccl_pad is all that runs here")]
    except OSError as error:
        setting = "allow memfd_create in the container's seccomp profile; until then comm_backend: nccl_pad is all that runs here"
        return [Finding(check="processor", severity=job.severity, found=f"memfd_create fails: {error.strerror}", setting=setting)]
    os.close(descriptor)
    return [Finding(check="processor", severity="ok", found=f"{platform.machine()} with memfd_create")]


def check_memory() -> list[Finding]:
    """Free memory of the host, or of the memory cgroup."""
    free = available_memory()
    found = f"{free / GIB:.1f} GiB free, {len(os.sched_getaffinity(0))} cores"
    return [Finding(check="memory", severity="ok", found=found, details={"available_bytes": free})]


def check_locked_memory(job: Job) -> list[Finding]:
    """RLIMIT_MEMLOCK: the control words are pinned for GPUs; RDMA needs far more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding(check="locked memory", severity="ok", found="unlimited")]
    found = f"at most {soft // 1024} KiB may be locked"
    if not gpu_files():
        return [Finding(check="locked memory", severity="ok", found=f"{found}; without GPUs nothing is")]
    if soft >= LOCKED_BYTES and job.nodes == 1:
        return [Finding(check="locked memory", severity="ok", found=f"{found}, enough for control words pinned for GPUs")]
    why = "control words are pinned for GPUs" if soft < LOCKED_BYTES else "RDMA between nodes needs more"
    return [
        Finding(
            check="locked memory",
            severity="note",
            found=f"{found}, and {why}",
            setting="ulimit -l unlimited; in a container --ulimit memlock=-1; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    ]


def check_shm() -> list[Finding]:
    """Size of /dev/shm; the engine's own shared memory is not in it."""
    setting = "docker run --ipc host, or --shm-size 16g"
    try:
        state = os.statvfs(SHM)
    except OSError as error:
        return [Finding(check=SHM, severity="note", found=f"cannot be used ({error.strerror})", setting=setting)]
    free = state.f_bavail * state.f_frsize
    found = f"{free / GIB:.2f} GiB free (NCCL, RCCL and data loaders use it, the engine does not)"
    if free < SHM_BYTES and gpu_files():
        return [Finding(check=SHM, severity="note", found=found, setting=setting)]
    return [Finding(check=SHM, severity="ok", found=found)]


def check_temporary_folder(environment: Mapping[str, str]) -> list[Finding]:
    """Where torch's symmetric memory puts its sockets; only a run that uses it depends on it."""
    problem = temporary_folder_problem(environment)
    if problem:
        return [Finding(check="temporary folder", severity="note", found=problem, setting="export TMPDIR=/tmp")]
    return [Finding(check="temporary folder", severity="ok", found=_temporary_folder(environment))]


def temporary_folder_problem(environment: Mapping[str, str]) -> str | None:
    """Why torch's symmetric memory cannot bind its socket, which is called ``symm_mem-PID``; None where it can."""
    folder = _temporary_folder(environment)
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written, and odc.transport: symm_mem puts sockets there"
    if len(f"{folder}/symm_mem-{_LARGEST_PID}".encode()) >= _SUN_PATH:
        return f"{folder} is too long a name for the sockets that odc.transport: symm_mem puts there"
    return None


def _temporary_folder(environment: Mapping[str, str]) -> str:
    return next((environment[key] for key in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if key in environment), "/tmp")


def check_ptrace() -> list[Finding]:
    """Whether a process may look into another; told because other libraries need it."""
    scope = PTRACE_SCOPE.read_text().strip() if PTRACE_SCOPE.exists() else "not restricted by Yama"
    found = f"ptrace scope {scope}; not needed: descriptors of shared memory travel over sockets"
    return [Finding(check="ptrace", severity="ok", found=found)]
