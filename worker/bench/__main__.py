"""`headrace bench`, and `make bench`: what this machine does with a model.

By default our engine, our engine through the queue and Transformers' static batches in one run;
the other modes are a flag each. Every mode prints Markdown and writes JSON to --out.
"""

import subprocess
import sys
from pathlib import Path

import click

from headrace.worker.bench import report, workloads
from headrace.worker.bench.machine import describe_cpu


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
def main(
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
) -> None:
    """Measure this machine, with your model and your prompts."""
    from headrace.worker.bench import side_by_side
    from headrace.worker.bench.compare import table
    from headrace.worker.bench.subject import load_subject

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
    rows = side_by_side.run(subject, repeats, out)
    report.write(out / "bench.json", {"threads": subject.threads, "model": model, "rows": rows})
    click.echo(table(rows))
    if queue_alone if queue_alone is not None else prompts is None:
        command = [sys.executable, "-m", "headrace.worker.bench.queue"]
        subprocess.run([*command, "--out", str(out / "queue.json")], check=True)


if __name__ == "__main__":
    main()
