"""CUDA graphs for decode steps: which sizes are recorded, which one a batch takes, what they cost.

A graph is recorded for a fixed number of rows; a batch with fewer is padded with rows that read and
write the dummy block only. The grid is fine, because padding is computed like everything else: a
grid of doublings computes up to twice the rows. Knows no model and no kernel.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.engine.accelerator import Accelerator, Captured


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows to record for, ascending: 1, 2, 4, then every 8 to 256, every 16 to 512, every 32 to
    1024, every 64 above; the last is `max_num_seqs` itself."""
    sizes = [1, 2, 4]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += 8 if size < 256 else 16 if size < 512 else 32 if size < 1024 else 64
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What recording took. `num_graphs` 0: none are used, and `reason` says why."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    largest: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if not self.num_graphs:
            return f"none ({self.reason})"
        return (
            f"{self.num_graphs} for decodes of up to {self.largest} rows,"
            f" {self.seconds:.1f} s and {self.num_bytes / 2**20:.0f} MiB to capture"
        )


class CUDAGraphRunner:
    """Records `decode(rows, shared)` for every size, with and without shared prefixes, and replays
    the one that fits."""

    def __init__(
        self,
        accelerator: Accelerator,
        sizes: Sequence[int],
        decode: Callable[[int, bool], Tensor],
        shared: bool,
    ) -> None:
        self._accelerator = accelerator
        self._sizes = sorted(sizes)
        self._decode = decode
        self._kinds = (False, True) if shared else (False,)
        self._captured: dict[tuple[int, bool], Captured] = {}

    def capture(self) -> GraphReport:
        """Record all, the largest first: the others then live in its memory."""
        before, started = self._accelerator.memory().free, time.perf_counter()
        for size in reversed(self._sizes):
            for shared in self._kinds:
                if not shared or size > 1:
                    self._captured[size, shared] = self._accelerator.capture(
                        lambda size=size, shared=shared: self._decode(size, shared)  # type: ignore[misc]
                    )
        return GraphReport(
            num_graphs=len(self._captured),
            seconds=time.perf_counter() - started,
            num_bytes=max(before - self._accelerator.memory().free, 0),
            largest=self._sizes[-1],
        )

    def size_for(self, rows: int) -> int | None:
        """The smallest recorded size that holds `rows`; None when none does."""
        index = bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int, shared: bool) -> Tensor:
        return self._captured[size, shared].replay()
