"""A device of the test's own, as asynchronous as one can be: nothing is done before the host waits.

`DelayedAccelerator` keeps what is submitted, and does it, in order, only when a mark is waited for.
What the host changes in between, and what it reads too early, is then wrong for certain. While a
step is launched, waiting for work that is not done is an error (`HostSync`), and the submitted work
itself may not look at a value: torch operations that would halt a CUDA stream are refused, but for
what Triton's interpreter does inside a kernel.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from headrace.engine.accelerator import Captured, Mark, Memory
from headrace.engine.batch import SampledTokens, ScheduledBatch, StepHandle
from headrace.engine.kv.block_pool import Block
from headrace.engine.layers.backend import LayerKV

_LOOKS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave",
}
_in_kernel = False
_PEEKS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__")


class HostSync(BaseException):
    """The host would have waited for the device. No Exception: the engine must not take it for a
    fault of the device."""


class _NoLooks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        looks = name in _LOOKS
        if name in ("aten::index", "aten::index_put_", "aten::index_put"):
            looks = any(index is not None and index.dtype == torch.bool for index in args[1])
        if looks:
            raise HostSync(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` stands for what a device does: it may look at values."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        global _in_kernel
        before, _in_kernel = _in_kernel, True
        try:
            with _disable_current_modes():
                return function(*args, **kwargs)
        finally:
            _in_kernel = before

    return kernel


@contextmanager
def no_looking() -> Iterator[None]:
    """Inside, reading a tensor's values raises HostSync; a kernel under the interpreter may."""
    run = interpreter.GridExecutor.__call__
    originals = {name: getattr(Tensor, name) for name in _PEEKS}

    def refuse(name: str) -> Callable[..., Any]:
        def peek(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _in_kernel:
                raise HostSync(f"Tensor.{name} waits for the device")
            return originals[name](self, *args, **kwargs)

        return peek

    interpreter.GridExecutor.__call__ = as_kernel(run)
    for name in _PEEKS:
        setattr(Tensor, name, refuse(name))
    try:
        with _NoLooks():
            yield
    finally:
        interpreter.GridExecutor.__call__ = run
        for name, original in originals.items():
            setattr(Tensor, name, original)


class DelayedAccelerator:
    """`launching`: a step is being launched, so nothing may wait. `num_late`: pieces of work that
    were done after the host had gone on."""

    device = torch.device("cpu")
    description = "a device that is late"

    def __init__(self, warm: bool = False) -> None:
        """`warm`: graphs are warmed up before they are recorded, as on CUDA; slow."""
        self.launching = False
        self._warm = warm
        self.num_late = 0
        self._pending: deque[Callable[[], None]] = deque()
        self._num_submitted = 0
        self._num_done = 0

    def host_bytes(self, size: int) -> Tensor:
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def submit(self, work: Callable[[], None]) -> None:
        self._pending.append(work)
        self._num_submitted += 1

    def mark(self) -> Mark:
        return _Late(self, self._num_submitted)

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        self.run_until(self._num_submitted)
        if self._warm:
            work()
        return _Recorded(work)

    def seconds(self, work: Callable[[], None]) -> float:
        raise AssertionError("a late device is not timed")

    def memory(self) -> Memory:
        return Memory(1 << 30, 1 << 30)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def run_until(self, count: int) -> None:
        if self.launching and self._num_done < count:
            raise HostSync("a launch waits for the device")
        while self._num_done < count:
            work = self._pending.popleft()
            self._num_done += 1
            self.num_late += 1
            with no_looking():
                work()


class _Late:
    def __init__(self, accelerator: DelayedAccelerator, count: int) -> None:
        self._accelerator, self._count = accelerator, count

    def wait(self) -> None:
        self._accelerator.run_until(self._count)


class _Recorded:
    """A graph: what was recorded may be replayed, and its output stays where it was."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self._output: Tensor | None = None

    def replay(self) -> Tensor:
        output = self._work()
        if self._output is None:
            self._output = output.clone()
        return self._output.copy_(output)


class LaunchGuard:
    """A runner whose `execute` may not wait for its DelayedAccelerator."""

    def __init__(self, runner: Any, accelerator: DelayedAccelerator) -> None:
        self._runner, self._accelerator = runner, accelerator

    def execute(self, batch: ScheduledBatch) -> StepHandle:
        self._accelerator.launching = True
        try:
            handle: StepHandle = self._runner.execute(batch)
            return handle
        finally:
            self._accelerator.launching = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class LateRunner:
    """A runner for a CPU behind handles: a batch is computed when a result is asked for, with all
    those before it. `most` is how many were ever waiting at once."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._pending: deque[_LateStep] = deque()
        self.most = 0

    def execute(self, batch: ScheduledBatch) -> StepHandle:
        step = _LateStep(self, batch)
        self._pending.append(step)
        self.most = max(self.most, len(self._pending))
        return step

    def compute_up_to(self, step: "_LateStep") -> None:
        while step.found is None:
            first = self._pending.popleft()
            first.found = self._runner.execute(first.batch).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _LateStep:
    def __init__(self, runner: LateRunner, batch: ScheduledBatch) -> None:
        self._runner, self.batch = runner, batch
        self.found: SampledTokens | None = None

    def result(self) -> SampledTokens:
        self._runner.compute_up_to(self)
        assert self.found is not None
        return self.found


@contextmanager
def freed_blocks_are_poison(engine: Any, layers: list[LayerKV]) -> Iterator[list[int]]:
    """Inside, a block's keys and values become NaN at the moment when it is free: a step in flight
    that still reads it gives NaN. With prefix caching off; yields the ids that were freed."""
    pool = engine._scheduler.blocks._pool
    release, freed = pool.release, []

    def poisoned(blocks: Any) -> None:
        given: list[Block] = list(blocks)
        release(given)
        for block in given:
            if block.ref_count == 0:
                freed.append(block.block_id)
                with torch.inference_mode():
                    for layer in layers:
                        layer.key[block.block_id] = torch.nan
                        layer.value[block.block_id] = torch.nan

    pool.release = poisoned
    try:
        yield freed
    finally:
        del pool.release
