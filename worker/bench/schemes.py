"""What each way to hold the weights gives on this machine: speed, memory, perplexity, in one run.

Every scheme is loaded by itself, puts out the same number of tokens for the same requests, and
reads the same text. The first is what the others are compared with.
"""

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from headrace.engine.errors import EngineError
from headrace.engine.evaluate.loaded import Loaded
from headrace.engine.evaluate.text import DEFAULT, TextReader, read_text
from headrace.worker.bench import measurement, trial
from headrace.worker.bench.report import figure, markdown
from headrace.worker.bench.subject import Subject
from headrace.worker.bench.workloads import BenchRequest

REQUESTS = 16
TEXT_TOKENS = 512
_CONTEXT = 128
_AT_LOAD = ("int8", "int8-dynamic", "int8-dynamic+head", "int4-g64", "int4-g32", "int3-g64", "nf4")


@dataclass(frozen=True, slots=True)
class Row:
    """`rates`: output tokens/s by workload; `alone`: of one sequence by itself; sizes in bytes.
    `failure`: why the scheme does not run; the rest is empty then."""

    scheme: str
    rates: Mapping[str, float]
    alone: float | None = None
    linear_bytes: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    failure: str | None = None


def schemes_of(subject: Subject) -> list[str]:
    """The float type, what a GGUF file holds packed, and what is made at load."""
    stored = ("gguf",) if subject.path.suffix == ".gguf" else ()
    return [subject.dtypes[0], *stored, *_AT_LOAD]


def run(
    subject: Subject,
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
    repeats: int,
    text: str | None = None,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, Any]:
    """`names` empty: `schemes_of`. `limit`: requests of each workload, None: the first 16."""
    work = {name: requests[: limit or REQUESTS] for name, requests in subject.work.items()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        reader = TextReader(text or read_text(DEFAULT), text_tokens, Path(folder))
        for name in names or schemes_of(subject):
            click.echo(f"  {name}", err=True)
            try:
                rows.append(_measure(subject, name, work, repeats, reader, first=not rows))
            except EngineError as error:
                if not rows:
                    raise
                rows.append(Row(name, {}, failure=str(error)))
    return {
        "model": subject.model,
        "threads": subject.threads,
        "repeats": repeats,
        "requests": {name: len(requests) for name, requests in work.items()},
        "text_tokens": text_tokens,
        "rows": [asdict(row) for row in rows],
    }


def _measure(
    subject: Subject,
    name: str,
    work: Mapping[str, Sequence[BenchRequest]],
    repeats: int,
    reader: TextReader,
    *,
    first: bool,
) -> Row:
    config = trial.config_for(subject.path, name, subject.threads, **subject.options)
    loaded = Loaded.load(config)
    engine, runner = loaded.engine, loaded.runner
    runner.warm_up()
    # Reading uses the first blocks of the KV pool, so it comes before anything is cached there.
    score, distance = (reader.first(loaded), None) if first else reader.second(loaded)
    context = min(_CONTEXT, engine.limits.max_model_len - 16)
    alone = statistics.median(
        measurement.decode_seconds(engine, 1, context) for _ in range(repeats)
    )
    rates = {}
    for workload, requests in work.items():
        trial.run(engine, requests[:2])
        trials = [trial.run(engine, requests) for _ in range(repeats)]
        rates[workload] = statistics.median(t.output_tokens / t.seconds for t in trials)
    row = Row(
        scheme=name,
        rates=rates,
        alone=1 / alone,
        linear_bytes=runner.weight_memory.linear,
        weight_bytes=runner.weight_memory.total,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        perplexity=score.perplexity,
        kl=None if distance is None else distance.kl_mean,
    )
    del loaded, engine, runner
    gc.collect()
    return row


def table(result: Mapping[str, Any]) -> str:
    """Markdown; speeds also as times of the first scheme's."""
    workloads = list(result["requests"])
    head = ["scheme", *(f"{name} tok/s" for name in workloads), "one alone tok/s"]
    head += ["linear MB", "all weights MB", "KV KiB/token", "perplexity", "KL"]
    base = result["rows"][0]
    rows: list[list[str]] = []
    for row in result["rows"]:
        if row["failure"]:
            rows.append([row["scheme"], row["failure"], *[""] * (len(head) - 2)])
            continue
        cells = [row["scheme"]]
        cells += [_rate(row["rates"][name], base["rates"][name]) for name in workloads]
        cells += [
            _rate(row["alone"], base["alone"]),
            f"{row['linear_bytes'] / 1e6:.0f}",
            f"{row['weight_bytes'] / 1e6:.0f}",
            figure(row["kv_bytes_per_token"] / 1024),
            f"{row['perplexity']:.2f}",
            "" if row["kl"] is None else f"{row['kl']:.4f}",
        ]
        rows.append(cells)
    return markdown(head, rows)


def _rate(value: float, base: float) -> str:
    return f"{figure(value)} ({value / base:.2f})"
