"""What this machine is: processor, cores that we may use, memory, GPU, installed engine.

Looks by itself at what the operating system says, and asks another process where torch would have
to be imported.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ASK_TORCH = """
import json
try:
    import torch
    gpus = [
        {"name": torch.cuda.get_device_name(i),
         "memory": torch.cuda.get_device_properties(i).total_memory}
        for i in range(torch.cuda.device_count())
    ] if torch.cuda.is_available() else []
    print(json.dumps({"torch": torch.__version__, "gpus": gpus}))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` counts what this process may use: affinity and cgroup quota. Memory in bytes."""

    system: str
    processor: str
    cores: float
    memory: int
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        features = f" ({', '.join(self.features)})" if self.features else ""
        cores = f"{self.cores:g}"
        return (
            f"{self.processor}{features}, {cores} core{'' if cores == '1' else 's'},"
            f" {self.memory / 2**30:.1f} GiB, {self.system}"
        )


def this_machine() -> Machine:
    """What the operating system says."""
    info = _read("/proc/cpuinfo")
    processor = _field(info, "model name") or platform.processor() or platform.machine()
    flags = set((_field(info, "flags") or "").split())
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=" ".join(processor.split()),
        cores=usable_cores(),
        memory=_memory(),
        features=tuple(name for name in known if name in flags),
    )


def usable_cores() -> float:
    """The smaller of the affinity mask and the cgroup's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def ask_torch() -> dict[str, Any]:
    """`{"torch": version, "gpus": [{"name", "memory"}]}` or `{"error": why}`, from a process of its
    own: importing torch takes seconds and memory that a client has no use for."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": done.stderr.strip()[-200:] or "python could not be started"}
    return answer if isinstance(answer, dict) else {"error": "no answer"}


def _memory() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _field(text: str, name: str) -> str | None:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
