"""Stage ``gpus``: what torch sees, whether GPUs reach each other, and whether a stream can write a control word.

Runs in the child process: it makes a context on every GPU, and a broken driver may not answer.
"""

from __future__ import annotations

import mmap
from typing import Any

from primus_odc.doctor.finding import Finding
from primus_odc.doctor.job import Job
from primus_odc.doctor.system import GIB, gpu_files
from primus_odc.errors import OdcError

_VISIBLE = "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES"
_WORD = 0x0123456789ABCDEF


def check_gpus(job: Job) -> list[Finding]:
    """GPUs, peer access and control words; what later stages need goes into ``job.facts``."""
    try:
        import torch
    except ImportError:
        return []  # the stage of the packages says why

    count = torch.cuda.device_count()
    job.facts["gpus"] = count
    if count == 0:
        return [_none_seen(torch)]
    names = [torch.cuda.get_device_name(device) for device in range(count)]
    free = min(torch.cuda.mem_get_info(device)[0] for device in range(count))
    job.facts["gpu_free_bytes"] = free
    listing = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    findings = [Finding(check="GPUs", severity="ok", found=f"{listing}; at least {free / GIB:.1f} GiB free", details={"gpus": names})]
    return [*findings, _check_peers(job, torch, count), _check_words(job, torch)]


def _none_seen(torch: Any) -> Finding:
    files = gpu_files()
    if not files:
        return Finding(check="GPUs", severity="ok", found="none on this machine")
    build = "ROCm" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return Finding(
        check="GPUs",
        severity="note",
        found=f"torch sees none, but {', '.join(files)} {'exist' if len(files) > 1 else 'exists'}; this torch is a {build} build",
        setting="a torch built for these GPUs, a driver that answers nvidia-smi or rocm-smi, for AMD the groups video and render; check "
        + _VISIBLE,
    )


def _check_peers(job: Job, torch: Any, count: int) -> Finding:
    missing = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(torch.device("cuda", a), torch.device("cuda", b))
    ]
    job.facts["no_p2p"] = missing
    if missing:
        return Finding(
            check="P2P",
            severity=job.severity,
            found=f"no peer access between GPUs {', '.join(missing)}, which odc.transport: symm_mem needs",
            setting=f"use GPUs that reach each other ({_VISIBLE}; nvidia-smi topo -p2p r), or comm_backend: nccl_pad",
        )
    return Finding(check="P2P", severity="ok", found="every GPU reaches every other" if count > 1 else "one GPU")


def _check_words(job: Job, torch: Any) -> Finding:
    """Pin a page and let a stream write into it, as the transport does with its control words."""
    try:
        seen = _written_word(torch)
    except (OdcError, OSError, AttributeError) as error:
        job.facts["stream_words"] = str(error)
        return Finding(check="control words", severity=job.severity, found=str(error))
    if seen != _WORD:
        found = f"a stream wrote {_WORD:#x} and the host reads {seen:#x}"
        job.facts["stream_words"] = found
        return Finding(check="control words", severity=job.severity, found=found, setting="comm_backend: nccl_pad")
    return Finding(check="control words", severity="ok", found="pinned, and written by a stream")


def _written_word(torch: Any) -> int:
    from primus_odc.symmetric.stream_words import StreamWriter

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.int64)
    writer = StreamWriter(page, device)
    writer.write(0, _WORD)
    torch.cuda.synchronize(device)
    seen = int(page[0])
    writer.close()
    return seen
