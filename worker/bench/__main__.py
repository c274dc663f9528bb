"""`headrace bench`, and `make bench`: what this machine does with a model.

By default our engine, our engine through the queue and Transformers' static batches in one run;
the other modes are a flag each. Every mode prints Markdown and writes JSON to --out.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.engine.engine import Engine
from headrace.engine.errors import EngineError
from headrace.engine.planner.calibration import Point
from headrace.worker.bench import (
    ablate,
    ablate_report,
    beside_peers,
    cold_start,
    exporter,
    load_cli,
    plots,
    report,
    schemes,
    side_by_side,
    step_profile,
    trial,
    workloads,
)
from headrace.worker.bench import measurement as calibrate
from headrace.worker.bench.compare import table
from headrace.worker.bench.machine import describe_cpu
from headrace.worker.bench.peers.install import PEERS
from headrace.worker.bench.subject import Subject, fast_dtype, load_subject
from headrace.worker.options import BytesType, FiniteType


class _Bench(click.Command):
    """What the engine refuses, a model or a setting, is one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            click.echo(f"Error: {command} ended with status {error.returncode}", err=True)
            ctx.exit(1)


@click.command("bench", cls=_Bench, context_settings={"auto_envvar_prefix": "HEADRACE_BENCH"})
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
@click.option("--threads", type=click.IntRange(1, 1024), help="Default: this process's CPU quota.")
@click.option(
    "--out", default=report.OUT, show_default=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option(
    "--queue-alone/--no-queue-alone",
    default=None,
    help="Also the queue by itself; default: unless --prompts is given.",
)
@click.option(
    "--kv-cache-memory",
    type=BytesType(),
    help="Our engine's KV pool (2G, 500M); default: measured. Not for --load.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Our engine in deterministic mode; --ablate shows what that costs. Not for --load.",
)
@click.option(
    "--measurement/--no-measurement",
    default=True,
    help="Keep a few timed steps for `headrace plan`.",
)
@click.option("--load", "mode", flag_value="load", help="Load test: percentiles, goodput, P99.")
@click.option("--ablate", "mode", flag_value="ablate", help="What each technique is worth.")
@click.option(
    "--schemes", "mode", flag_value="schemes", help="Speed, memory and perplexity of each scheme."
)
@click.option(
    "--scheme",
    "chosen_schemes",
    multiple=True,
    help="--schemes: only this one (int4-g64, gguf, float32, ...). May be repeated.",
)
@click.option(
    "--technique",
    "techniques",
    multiple=True,
    type=click.Choice(ablate.TECHNIQUES),
    help="--ablate: only this one. May be repeated.",
)
@click.option("--profile", "mode", flag_value="profile", help="Where a step's time goes.")
@click.option(
    "--running",
    type=click.IntRange(1),
    help="--profile: so many requests, all of them at a time; default: 64.",
)
@click.option(
    "--temperature", type=FiniteType(0, 100), help="--profile: sample; default: 0, greedy."
)
@click.option("--top-p", type=FiniteType(0, 1, above=True), help="--profile: nucleus.")
@click.option("--top-k", type=click.IntRange(1), help="--profile: among the k likeliest.")
@click.option("--cold-start", "mode", flag_value="cold-start", help="A worker's start, by phase.")
@click.option(
    "--exporter", "mode", flag_value="exporter", help="A scrape with 1,000,000 jobs over 1,000."
)
@click.option("--peers", "mode", flag_value="peers", help="Beside other engines, each installed.")
@click.option(
    "--peer",
    "chosen_peers",
    multiple=True,
    type=click.Choice([peer.name for peer in PEERS]),
    help="--peers: only this one. May be repeated.",
)
@click.option(
    "--install/--no-install",
    "install_peers",
    default=True,
    help="--peers: make the environments that are missing.",
)
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
    kv_cache_memory: int | None,
    deterministic: bool,
    measurement: bool,
    mode: str | None,
    running: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    techniques: tuple[str, ...],
    chosen_schemes: tuple[str, ...],
    chosen_peers: tuple[str, ...],
    install_peers: bool,
    **of_load: Any,
) -> None:
    """Measure this machine, with your model and your prompts.

    Without a mode: our engine, our engine through the queue and Transformers, side by side. Answers
    have fixed lengths there and in --ablate, --schemes and --profile (the end of sequence is
    ignored).
    """
    if mode == "load":
        _check_kept(out)
        name = names[0] if names else "shared"
        ctx.exit(_load(model, prompts, name, dtypes, threads, limit, out, of_load))
    if mode == "exporter":
        exporter.main(["--out", str(out / "exporter.json")])
        return
    if mode == "cold-start":
        _check_kept(out)
        arguments = [*(("--num-threads", str(threads)) if threads else ()), *_how(dtypes)]
        started = cold_start.run(model, arguments, repeats)
        report.write(out / "cold_start.json", started)
        click.echo(cold_start.table(started))
        return
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if mode != "profile" and (sampling or running):
        raise click.UsageError("--running, --temperature, --top-p and --top-k are for --profile")
    if sampling and not temperature:
        raise click.UsageError("--top-p and --top-k choose among what --temperature samples")
    _check_kept(out)
    chosen: dict[str, object] = {}
    if running is not None:
        chosen["max_num_seqs"] = running
    if kv_cache_memory is not None:
        chosen["kv_cache_memory_bytes"] = kv_cache_memory
    if deterministic:
        chosen["deterministic"] = True
    subject = load_subject(
        model,
        dtypes=dtypes,
        names=names,
        prompts=prompts,
        max_tokens=max_tokens,
        limit=limit,
        count=running,
        threads=threads,
        options=chosen,
    )
    click.echo(f"{describe_cpu()}, {subject.threads} threads", err=True)
    about = {"threads": subject.threads, "model": model}
    if mode == "ablate":
        result = ablate.run(
            subject, limit=limit, repeats=repeats, only=techniques or ablate.TECHNIQUES
        )
        report.write(out / "ablate.json", result)
        click.echo(ablate_report.table(result))
        plots.draw(ablate_report.plot, result, out / "ablate.png")
        return
    if mode == "schemes":
        result = schemes.run(subject, names=chosen_schemes, limit=limit, repeats=repeats)
        report.write(out / "schemes.json", result)
        click.echo(schemes.table(result))
        return
    if mode == "peers":
        wanted = [peer for peer in PEERS if not chosen_peers or peer.name in chosen_peers]
        rows = beside_peers.run(subject, wanted, repeats, out, install=install_peers)
        report.write(out / "peers.json", {**about, "repeats": repeats, "rows": rows})
        click.echo(beside_peers.markdown_table(rows))
        plots.draw(beside_peers.plot, rows, out / "peers.png")
        return
    if mode == "profile":
        _profile(subject, sampling, out)
        return
    rows = side_by_side.run(subject, repeats, out)
    report.write(out / "bench.json", {**about, "rows": rows})
    click.echo(table(rows))
    if measurement:
        _calibrate(subject)
    if queue_alone if queue_alone is not None else prompts is None:
        command = [sys.executable, "-m", "headrace.worker.bench.queue"]
        subprocess.run([*command, "--out", str(out / "queue.json")], check=True)


def _check_kept(out: Path) -> None:
    """What can't be written is said before it is measured. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass


def _how(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """The worker's option for the first of --dtype, a float type or a quantization."""
    if not dtypes:
        return ()
    return ("--dtype" if dtypes[0] in side_by_side.FLOATS else "--quantization", dtypes[0])


def _profile(subject: Subject, sampling: Mapping[str, object], out: Path) -> None:
    """Every workload and dtype: a table each, and all of them in one file."""
    results = []
    for dtype in subject.dtypes:
        engine = Engine.load(
            trial.config_for(subject.path, dtype, subject.threads, **subject.options)
        )
        for name, requests in subject.work.items():
            found = step_profile.run(engine, requests, sampling)
            results.append(
                {"workload": name, "dtype": dtype, "sampling": sampling, "phases": found}
            )
            told = ", ".join(f"{key} {value}" for key, value in sampling.items()) or "greedy"
            click.echo(f"{name}, {dtype}, {told}\n\n{step_profile.table(found)}\n")
    about = {"threads": subject.threads, "model": subject.model}
    report.write(out / "profile.json", {**about, "profiles": results})


def _calibrate(subject: Subject) -> None:
    """The planner's measurement, of every dtype that it has a name for."""
    points: list[Point] = []
    for dtype in subject.dtypes:
        scheme = calibrate.scheme_of(dtype)
        if scheme is not None:
            engine = Engine.load(
                trial.config_for(subject.path, dtype, subject.threads, **subject.options)
            )
            points += calibrate.measure(engine, str(subject.path), scheme)
    if points:
        click.echo(f"{calibrate.keep(points)}: measured steps for `headrace plan`", err=True)


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
    from headrace.engine.machine import available_threads

    chosen = load_cli.LoadOptions(**of_load)
    dtype = dtypes[0] if dtypes else fast_dtype()
    requests = load_cli.requests_for(prompts, name, chosen, limit)
    service = load_cli.service_for(chosen, model, dtype, threads or available_threads())
    workload = str(prompts) if prompts is not None else name
    return 0 if load_cli.run(requests, service, chosen, out, {"workload": workload}) else 1


if __name__ == "__main__":
    main()
