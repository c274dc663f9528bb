"""How much memory a piece of work takes at its peak: the process's, and on a GPU the device's."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.engine.loading.heap import trim_heap


@dataclass(slots=True)
class Peak:
    """Bytes that the process grew by at most inside a `peak_memory` block, and the device's tensors
    at most; None: not measurable here."""

    extra_bytes: int | None = None
    device_bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Resets Linux's high-water mark of this process and reads it at the end. What the allocator
    keeps for later is given back first, else its reuse would not show."""
    peak = Peak()
    give_back()
    on_device = torch.cuda.is_available()
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    before = None
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    yield peak
    if before is not None:
        peak.extra_bytes = max(0, _status("VmHWM") - before)
    if on_device:
        peak.device_bytes = torch.cuda.max_memory_allocated()


def give_back() -> None:
    """Collect what nobody holds, and return the allocators' free memory to the system."""
    gc.collect()
    trim_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
