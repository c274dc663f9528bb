"""`headrace bench`, and `make bench`: what this machine does with a model.

By default our engine, our engine through the queue and Transformers' static batches in one run;
the other modes are a flag each. Every mode prints Markdown and writes JSON to --out.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from headrace.worker.bench import load_cli, report, side_by_side, workloads
from headrace.worker.bench.compare import table
from headrace.worker.bench.machine import describe_cpu
from headrace.worker.bench.subject import fast_dtype, load_subject


@click.command("bench")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your own requests: JSONL as `headrace run` reads it.",
)
@click.option(
    "--max-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Length of answers to --prompts that set none.",
)
@click.option("--limit", type=click.IntRange(1), help="The first so many requests only.")
@click.option("--workload", "names", multiple=True, type=click.Choice(list(workloads.WORKLOADS)))
@click.option(
    "--dtype", "dtypes", multiple=True, help="May be repeated; default: this machine's fast one."
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="Default: this process's CPU quota.")
@click.option(
    "--out", default=report.OUT, show_default=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option(
    "--queue-alone/--no-queue-alone",
    default=None,
    help="Also the queue by itself; default: unless --prompts is given.",
)
@click.option("--load", "mode", flag_value="load", help="Load test: percentiles, goodput, P99.")
@load_cli.options
@click.pass_context
def main(
    ctx: click.Context,
    /,
    model: str,
    prompts: Path | None,
    max_tokens: int,
    limit: int | None,
    names: tuple[workloads.WorkloadName, ...],
    dtypes: tuple[str, ...],
    repeats: int,
    threads: int | None,
    out: Path,
    queue_alone: bool | None,
    mode: str | None,
    **of_load: Any,
) -> None:
    """Measure this machine, with your model and your prompts.

    Without a mode: our engine, our engine through the queue and Transformers, side by side.
    """
    if mode == "load":
        name = names[0] if names else "shared"
        ctx.exit(_load(model, prompts, name, dtypes, threads, limit, out, of_load))

    subject = load_subject(
        model,
        dtypes=dtypes,
        names=names,
        prompts=prompts,
        max_tokens=max_tokens,
        limit=limit,
        threads=threads,
    )
    click.echo(f"{describe_cpu()}, {subject.threads} threads", err=True)
    about = {"threads": subject.threads, "model": model}
    rows = side_by_side.run(subject, repeats, out)
    report.write(out / "bench.json", {**about, "rows": rows})
    click.echo(table(rows))
    if queue_alone if queue_alone is not None else prompts is None:
        command = [sys.executable, "-m", "headrace.worker.bench.queue"]
        subprocess.run([*command, "--out", str(out / "queue.json")], check=True)


def _load(
    model: str,
    prompts: Path | None,
    name: workloads.WorkloadName,
    dtypes: tuple[str, ...],
    threads: int | None,
    limit: int | None,
    out: Path,
    of_load: dict[str, Any],
) -> int:
    from headrace.engine.runner import available_threads

    chosen = load_cli.LoadOptions(**of_load)
    dtype = dtypes[0] if dtypes else fast_dtype()
    requests = load_cli.requests_for(prompts, name, chosen, limit)
    service = load_cli.service_for(chosen, model, dtype, threads or available_threads())
    workload = str(prompts) if prompts is not None else name
    return 0 if load_cli.run(requests, service, chosen, out, {"workload": workload}) else 1


if __name__ == "__main__":
    main()
