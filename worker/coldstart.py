"""How long a worker takes from the start of its process until it can serve, by phase."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.worker.metrics import WorkerMetrics


def process_started_at() -> float:
    """Unix seconds at which this process began (Linux; elsewhere, now)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()


class ColdStart:
    """Collects the phases; each is also a metric. Phases of different threads may overlap."""

    def __init__(self, metrics: WorkerMetrics, started_at: float | None = None) -> None:
        self.started_at = process_started_at() if started_at is None else started_at
        self.phases: dict[str, float] = {}
        self._metrics = metrics

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - began)

    def record(self, name: str, seconds: float) -> None:
        self.phases[name] = seconds
        self._metrics.cold_start.labels(name).set(seconds)

    def since_start(self) -> float:
        return max(0.0, time.time() - self.started_at)

    def __str__(self) -> str:
        parts = (f"{name.replace('_', ' ')} {s:.2f}" for name, s in self.phases.items())
        return ", ".join(parts)
