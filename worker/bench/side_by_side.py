"""The default benchmark: our engine, our engine through the queue, and Transformers' static
batches, on the same weights and token ids in one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.worker.bench import workloads
from headrace.worker.bench.compare import System, compare
from headrace.worker.bench.subject import Subject

_SETTINGS = {"kv_cache_memory_bytes": "kv_cache_memory", "deterministic": "deterministic"}
FLOATS = ("float32", "bfloat16", "float16")


def systems(dtype: str, options: Mapping[str, object] | None = None) -> list[System]:
    """What runs in this environment; Transformers has no quantization of ours.

    `options`: of our engine, as in Subject: the size of its pool, deterministic mode.
    """
    ours = {_SETTINGS[name]: str(int(value)) for name, value in (options or {}).items()}  # type: ignore[call-overload]
    found = [
        System.module("headrace engine", "headrace_engine", dtype, **ours),
        System.module("headrace through the queue", "headrace_queue", dtype, **ours),
    ]
    if dtype in FLOATS:
        found.append(System.module("Transformers, batches of 16", "transformers_static", dtype))
    return found


def run(subject: Subject, repeats: int, out: Path) -> list[dict[str, Any]]:
    """One row a system, workload and dtype; `exact` counts outputs equal to the engine's own."""
    rows: list[dict[str, Any]] = []
    for name, requests in subject.work.items():
        path = out / f"{name}.jsonl"
        workloads.write(list(requests), path)
        for dtype in subject.dtypes:
            measured = compare(
                systems(dtype, subject.options),
                model=str(subject.path),
                workload=name,
                workload_path=path,
                threads=subject.threads,
                repeats=repeats,
            )
            rows += [row.summary(measured[0]) for row in measured]
    return rows
