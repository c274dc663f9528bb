"""What the runner asks of a device that computes while the host goes on: memory, order, graphs.

Work is submitted and done in that order; the host learns that it is done from a mark, and from
nothing else. `submit` takes a function that touches device tensors and page-locked host memory: on
CUDA it is called at once and enqueues kernels and copies; a device of another kind may call it
later. Knows no model.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_REPEATS = 10  # of what is timed


class Mark(Protocol):
    """A point in the order of the submitted work."""

    def wait(self) -> None:
        """Return when all that was submitted before it is done. Raises what that work raised."""
        ...


class Captured(Protocol):
    """Work that was recorded once, on tensors that stay where they are."""

    def replay(self) -> Tensor:
        """Do it again; the tensor that it returned when it was recorded, with new contents."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device: free to everybody now, and in all."""

    free: int
    total: int


class Accelerator(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def description(self) -> str:
        """The device's name, as a log line shows it."""
        ...

    def host_bytes(self, size: int) -> Tensor:
        """Host memory, uint8 [size], which the device reads and writes without a halt."""
        ...

    def submit(self, work: Callable[[], None]) -> None: ...

    def mark(self) -> Mark: ...

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Do `work` once to warm it up, and record it."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for `work` when it is done over and over."""
        ...

    def memory(self) -> Memory: ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Do `work` and wait for it: the most memory that it held at once, beyond what was held
        before."""
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Repeated:
    work: Callable[[], Tensor]

    def replay(self) -> Tensor:
        return self.work()


class HostAccelerator:
    """The CPU in the place of a device: done as soon as it is submitted, and a graph is a function
    that is called again. It runs the device's path where there is no device."""

    device = torch.device("cpu")
    description = "cpu, Triton's interpreter"

    def host_bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Mark:
        return _Done()

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        return _Repeated(work)

    def seconds(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def memory(self) -> Memory:
        import psutil

        found = psutil.virtual_memory()
        return Memory(int(found.available), int(found.total))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 0


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class CudaAccelerator:
    """One CUDA device. All work goes to one stream; it may be submitted from any thread, whose
    current device may be another one."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        # Graphs are replayed one after the other, so they may use the same memory in between.
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def description(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"{torch.cuda.get_device_name(self.device)} (compute capability {major}.{minor})"

    def host_bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self.device):
            work()

    def mark(self) -> Mark:
        with torch.cuda.device(self.device):
            return _CudaMark()

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        with torch.cuda.device(self.device):
            return self._capture(work)

    def _capture(self, work: Callable[[], Tensor]) -> Captured:
        # Once before: a kernel must not be compiled or loaded during a capture.
        work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a kernel that is collected now is unloaded, which no capture survives
        try:
            # Other threads (heartbeats, metrics) may go on; only this one must not allocate.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        finally:
            if collects:
                gc.enable()
        return _CudaGraph(graph, output)

    def seconds(self, work: Callable[[], None]) -> float:
        def repeated() -> Tensor:
            for _ in range(_REPEATS):
                work()
            return torch.empty(0, device=self.device)

        # As a graph: the host takes longer to launch a small kernel than the device to run it.
        with torch.cuda.device(self.device):
            graph = self._capture(repeated)
            start, end = _timer(), _timer()
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / _REPEATS

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(free, total)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with torch.cuda.device(self.device):
            work()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return peak
