"""`headrace bench --cold-start`: real workers started one after another, each with a job waiting.

The first start finds no compiled kernels, as on a new node; the others find what it compiled. Each
is set beside the bare load of the weights: their files read into memory, nothing else.
"""

import os
import re
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.loading.source import resolve_model
from headrace.producer import Client
from headrace.producer.local import LocalWorker, WorkerOptions
from headrace.producer.redis_server import PrivateRedis
from headrace.worker.bench.report import markdown
from headrace.worker.metrics import PHASES

QUEUE = "bench"
_ADDRESS = re.compile(r"metrics and health on (http://[^\"\s]+)")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds. `phases` as the worker shows them; `answered`: from its start to the first token of
    a job that waited; `bare`: the weights' files alone, read just before."""

    phases: dict[str, float]
    answered: float
    bare: float


def run(model: str, arguments: Sequence[str], repeats: int) -> dict[str, Any]:
    """One start without compiled kernels and `repeats` with them. Raises WorkerFailed."""
    path = resolve_model(model)
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    before = os.environ.get("NUMBA_CACHE_DIR")
    os.environ["NUMBA_CACHE_DIR"] = str(folder / "kernels")
    try:
        starts = [_start(path, tuple(arguments), folder) for _ in range(1 + repeats)]
    finally:
        if before is None:
            del os.environ["NUMBA_CACHE_DIR"]
        else:
            os.environ["NUMBA_CACHE_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
    first, later = _summary(starts[:1]), _summary(starts[1:])
    return {"model": model, "repeats": repeats, "first": first, "later": later}


def bare_load(path: Path) -> float:
    """Seconds to read the bytes of the weights into memory."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            opened.readinto(bytearray(file.stat().st_size))
    return time.perf_counter() - began


def table(result: dict[str, Any]) -> str:
    """Seconds by phase, first and later starts beside each other."""
    first, later = result["first"], result["later"]
    rows: list[Sequence[object]] = [
        (phase.replace("_", " "), f"{first[phase]:.2f}", f"{later[phase]:.2f}") for phase in PHASES
    ]
    rows.append(("**first token, from the start of the process**", *_both(result, "answered")))
    rows.append(("bare load of the weights", *_both(result, "bare")))
    rows.append(
        ("times the bare load", *(f"{x['answered'] / x['bare']:.1f}" for x in (first, later)))
    )
    head = (
        "phase, seconds",
        "first start on a node",
        f"later starts, median of {result['repeats']}",
    )
    return markdown(head, rows)


def _both(result: dict[str, Any], name: str) -> tuple[str, str]:
    return f"{result['first'][name]:.2f}", f"{result['later'][name]:.2f}"


def _summary(starts: Sequence[Start]) -> dict[str, float]:
    median = {phase: statistics.median(s.phases[phase] for s in starts) for phase in PHASES}
    return {
        **median,
        "answered": statistics.median(s.answered for s in starts),
        "bare": statistics.median(s.bare for s in starts),
    }


def _start(path: Path, arguments: tuple[str, ...], folder: Path) -> Start:
    bare = bare_load(path)
    log = folder / "worker.log"
    log.unlink(missing_ok=True)
    with PrivateRedis() as server, Client(server.url) as client:
        job = client.submit("One word:", queue=QUEUE, max_tokens=1, temperature=0.0)
        worker = LocalWorker(
            WorkerOptions(str(path), QUEUE, ("--port", "0", *arguments)), server.url, log
        )
        try:
            worker.watch()
            while not client.results([job.id]):
                worker.watch()
                time.sleep(0.05)
            phases = _phases(log)
        finally:
            worker.stop(10.0)
    return Start(phases, phases["total"] + phases["first_token"], bare)


def _phases(log: Path) -> dict[str, float]:
    """What the worker shows of its start."""
    found = _ADDRESS.search(log.read_text())
    assert found is not None, "a worker logs its address before it claims"
    with urllib.request.urlopen(f"{found[1]}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "headrace_worker_cold_start_seconds"
    }
