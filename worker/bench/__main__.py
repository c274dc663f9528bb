"""`make bench`: our engine, our engine through the queue, and Transformers' static batching.

One run, the same weights and token ids, in turn; then the queue alone. Writes
`build/bench/bench.json` and prints Markdown tables.
"""

import platform
import subprocess
import sys
import time
from pathlib import Path

import click
import orjson

from headrace.worker.bench import workloads
from headrace.worker.bench.compare import System, compare, table
from headrace.worker.bench.machine import describe_cpu

OUT = Path("build/bench")


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option(
    "--dtype", "dtypes", multiple=True, help="May be repeated; default: this machine's fast one."
)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(workloads.WORKLOADS)))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=0, help="0: this process's CPU quota.")
@click.option("--queue-alone/--no-queue-alone", default=True)
def main(
    model: str,
    dtypes: tuple[str, ...],
    names: tuple[workloads.WorkloadName, ...],
    repeats: int,
    threads: int,
    queue_alone: bool,
) -> None:
    """Measure; see the README for what the columns mean."""
    from headrace.engine.loading.source import resolve_model
    from headrace.engine.runner import available_threads, cpu_multiplies_bfloat16
    from headrace.engine.tokenizer import load_tokenizer

    fast_dtype = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    threads = threads or available_threads()
    click.echo(f"{describe_cpu()}, {threads} threads, Python {platform.python_version()}", err=True)
    rows = []
    for name in names or workloads.WORKLOADS:
        requests = workloads.build(
            name, lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        workload_path = OUT / f"{name}.jsonl"
        workloads.write(requests, workload_path)
        for dtype in dtypes or (fast_dtype,):
            systems = [
                System.module("headrace engine", "headrace_engine", dtype),
                System.module("headrace through the queue", "headrace_queue", dtype),
            ]
            if dtype in ("float32", "bfloat16"):
                systems.append(
                    System.module("Transformers, batches of 16", "transformers_static", dtype)
                )
            measured = compare(
                systems,
                model=str(path),
                workload=name,
                workload_path=workload_path,
                threads=threads,
                repeats=repeats,
            )
            rows += [row.summary(measured[0]) for row in measured]
    OUT.mkdir(parents=True, exist_ok=True)
    report = {
        "cpu": describe_cpu(),
        "threads": threads,
        "model": model,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": rows,
    }
    (OUT / "bench.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    click.echo(table(rows))
    if queue_alone:
        subprocess.run([sys.executable, "-m", "headrace.worker.bench.queue"], check=True)


if __name__ == "__main__":
    main()
