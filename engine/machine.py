"""What this machine has to compute with: its device, the float type fast on it, its threads.

Asks torch and the operating system; knows no model beyond the type that its weights are stored in.
"""

import os
import re
from pathlib import Path

import torch

from headrace.engine.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """auto (a CUDA device if there is one), cpu, cuda or cuda:N. Raises EngineError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise EngineError(f"device {name!r} is not supported (auto, cpu, cuda, cuda:N)")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            found = f"{count} CUDA devices" if torch.version.cuda else "this torch has no CUDA"
            raise EngineError(f"device {name!r} is not there ({found})")
        device = torch.device("cuda", device.index or 0)
    return device


def choose_dtype(chosen: str, stored: str) -> torch.dtype:
    """`chosen`, or for "auto" on a CPU: bfloat16 where the CPU multiplies it and the checkpoint is
    16 bits wide, else float32."""
    if chosen != "auto":
        if chosen not in _DTYPES:
            raise EngineError(f"dtype {chosen!r} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[chosen]
    if stored != "float32" and cpu_multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def choose_cuda_dtype(chosen: str, stored: str, capability: tuple[int, int]) -> torch.dtype:
    """`chosen`, or for "auto" the checkpoint's 16-bit type, bfloat16 for one stored in float32;
    below compute capability 8.0, which has no bfloat16, float16. EngineError: it cannot be run."""
    if capability < (7, 5):
        raise EngineError(
            f"compute capability {capability[0]}.{capability[1]} is not supported (7.5 and above)"
        )
    narrow = capability < (8, 0)
    if chosen == "auto":
        return torch.float16 if narrow or stored == "float16" else torch.bfloat16
    dtype = choose_dtype(chosen, stored)
    if narrow and dtype == torch.bfloat16:
        raise EngineError(
            "dtype bfloat16 needs compute capability 8.0; this device has"
            f" {capability[0]}.{capability[1]}: use auto, float16 or float32"
        )
    return dtype


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 dot products (elsewhere they are emulated, at a quarter of the
    speed of float32)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def available_threads() -> int:
    """CPUs that this process may use: its affinity, or less under a cgroup's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, count if quota is None else min(count, round(quota)))


def _cpu_quota() -> float | None:
    """CPUs' worth of time under cgroup v2 or v1, None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        limit = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return None
    return int(limit) / int(period) if int(limit) > 0 else None
