"""The device that is measured, and how a call on it is timed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """`tiny`: a rehearsal with small shapes; times then say nothing."""

    device: torch.device
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        if self.device.type != "cuda":
            return torch.float32
        capable = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return torch.bfloat16 if capable else torch.float16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of one call, with a cold cache on a GPU (each call is preceded by a write of more
        than the cache holds)."""
        if not self.tiny:
            call()
            self.synchronize()
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(call, warmup=10, rep=60, return_mode="median")) / 1e3
        times = []
        for _ in range(1 if self.tiny else 3):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def released(self) -> None:
        """Give memory back between two engines."""
        import gc

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device was seen to do: bytes/s of a large copy, FLOP/s of a large matmul."""

    bytes_per_s: float
    flops: float


def measured_ceilings(where: Device) -> Ceilings:
    size = 1 << (20 if where.tiny else 29)
    source = torch.empty(size, dtype=torch.int32, device=where.device).random_()
    target = torch.empty_like(source)
    seconds = where.seconds(partial(target.copy_, source))
    copied = 2 * source.numel() * source.element_size() / seconds
    side = 128 if where.tiny else 8192
    a = torch.randn(side, side, dtype=where.dtype, device=where.device)
    b = torch.randn(side, side, dtype=where.dtype, device=where.device)
    flops = 2.0 * side**3 / where.seconds(lambda: a @ b)
    return Ceilings(copied, flops)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        return (
            f"{properties.name} ({memory:.0f} GiB, sm_{properties.major}{properties.minor},"
            f" {properties.multi_processor_count} multiprocessors)"
        )
    from headrace.worker.bench.machine import describe_cpu

    return describe_cpu()
