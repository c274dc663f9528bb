"""What a benchmark measures: a model, in a dtype, on so many threads, with its workloads.

Resolved once from the command line. Knows no system that is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.worker.bench import workloads
from headrace.worker.bench.prompts import read_requests, to_workload
from headrace.worker.bench.workloads import BenchRequest, WorkloadName


@dataclass(frozen=True, slots=True)
class Subject:
    """`model` as the user named it, `path` where it lies; `work` by workload name; `options` of the
    engine that hold for whatever runs in this process."""

    model: str
    path: Path
    tokenizer: Any
    dtypes: tuple[str, ...]
    threads: int
    work: Mapping[str, Sequence[BenchRequest]]
    options: Mapping[str, object] = field(default_factory=dict)


def load_subject(
    model: str,
    *,
    dtypes: tuple[str, ...] = (),
    names: tuple[WorkloadName, ...] = (),
    prompts: Path | None = None,
    max_tokens: int = 128,
    limit: int | None = None,
    count: int | None = None,
    threads: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Subject:
    """Resolve and tokenize. `dtypes` empty: this machine's fast one; `names` empty: both workloads,
    unless `prompts` gives a file. `limit`: the first so many requests of each; `count`: of our
    workloads, 64 if not said."""
    from headrace.engine.loading.source import resolve_model
    from headrace.engine.machine import available_threads
    from headrace.engine.tokenizer import load_tokenizer

    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    work: dict[str, Sequence[BenchRequest]] = {}
    if prompts is not None:
        work[prompts.stem] = to_workload(read_requests(prompts, limit), tokenizer, max_tokens)
    for name in names or (() if prompts is not None else workloads.WORKLOADS):
        work[name] = workloads.build(
            name, lambda text: tokenizer.encode(text, add_special_tokens=False), count
        )[:limit]
    return Subject(
        *(model, path, tokenizer),
        dtypes=dtypes or (fast_dtype(),),
        threads=threads or available_threads(),
        work=work,
        options=options or {},
    )


def fast_dtype() -> str:
    """The float type that this machine multiplies fastest."""
    from headrace.engine.machine import cpu_multiplies_bfloat16

    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"
