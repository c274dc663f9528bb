"""`headrace bench --load`: from options to a load, its report and its verdict."""

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from headrace.worker.bench import load_report, plots, report, workloads
from headrace.worker.bench.load import LoadDriver, LoadPlan
from headrace.worker.bench.prompts import read_requests
from headrace.worker.bench.service import Service, private_service, running_service
from headrace.worker.bench.workloads import WorkloadName
from headrace.worker.options import FiniteType

Requests = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What `--load` is told beside what every mode is told."""

    rate: float | None
    concurrency: int
    requests: int | None
    duration: float | None
    drain: float
    seed: int
    warm_up: int
    redis_url: str | None
    queue: str | None
    worker_options: tuple[str, ...]
    p99: float | None
    goodput_limit: float | None
    against: Path | None


def options(command: Any) -> Any:
    """The options of `--load`, in the order that help shows them."""
    positive = FiniteType(0, above=True)
    for add in reversed(
        (
            click.option("--rate", type=positive, help="Load: arrivals a second, Poisson."),
            click.option(
                "--concurrency",
                default=8,
                show_default=True,
                type=click.IntRange(1),
                help="Load without --rate: requests under way at a time.",
            ),
            click.option("--requests", type=click.IntRange(1), help="Load: how many in all."),
            click.option("--duration", type=positive, help="Load: seconds of arrivals."),
            click.option(
                "--drain",
                default=120.0,
                show_default=True,
                type=positive,
                help="Load: seconds to wait for the last answers.",
            ),
            click.option("--seed", default=0, show_default=True, help="Load: of the arrivals."),
            click.option(
                "--warm-up",
                default=4,
                show_default=True,
                type=click.IntRange(0),
                help="Load: requests before the clock starts.",
            ),
            click.option(
                "--redis-url", help="Load: measure the service there; default: a private one."
            ),
            click.option("--queue", help="Load: the service's queue; default: its workers'."),
            click.option(
                "--worker-option",
                "worker_options",
                multiple=True,
                metavar="OPTION=VALUE",
                help="Load: an option of the private worker, as max-num-seqs=64. May be repeated.",
            ),
            click.option(
                "--p99", type=positive, help="Load: limit in seconds; exit code 1 above it."
            ),
            click.option(
                "--goodput-limit",
                type=positive,
                help="Load: seconds within which an answer counts; default: --p99.",
            ),
            click.option(
                "--against",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Load: an earlier run's load.json to compare with.",
            ),
        )
    ):
        command = add(command)
    return command


def requests_for(
    prompts: Path | None, name: WorkloadName, chosen: LoadOptions, limit: int | None
) -> Requests:
    """Fields of the requests: the user's as they stand, or a workload's, of fixed lengths."""
    if prompts is not None:
        found = read_requests(prompts, limit)
        if chosen.requests is not None and chosen.requests > len(found):
            click.echo(
                f"{prompts} has {len(found)} requests for {chosen.requests}: repeated ones are"
                " found in the prefix cache and flatter the figures",
                err=True,
            )
        return [request.model_dump(exclude_none=True, exclude={"v"}) for request in found]
    fixed = {"temperature": 0.0, "ignore_eos": True}
    count = chosen.requests or (None if chosen.duration is None else 4096)
    texts = workloads.texts(name, count)[:limit]
    return [{"prompt": text, "max_tokens": tokens, **fixed} for text, tokens in texts]


def run(
    requests: Requests,
    service: AbstractContextManager[Service],
    chosen: LoadOptions,
    out: Path,
    about: Mapping[str, Any],
) -> bool:
    """Measure, report and draw; whether `--p99` held (True without one)."""
    earlier = None
    if chosen.against is not None:
        earlier = _earlier(chosen.against)
    count = chosen.requests
    if count is None and chosen.duration is None:
        count = len(requests)
    plan = LoadPlan(
        chosen.rate, chosen.concurrency, count, chosen.duration, chosen.drain, chosen.seed
    )
    name = f"load-{uuid.uuid4().hex[:12]}"
    with service as ready:
        if chosen.warm_up:
            warm = replace(plan, rate=None, requests=chosen.warm_up, duration=None)
            LoadDriver(
                *(ready.client, _short(requests, chosen.warm_up), warm),
                queue=ready.queue,
                batch=f"{name}-warm",
                tick=ready.watch,
            ).run()
        done = LoadDriver(
            *(ready.client, requests, plan),
            queue=ready.queue,
            batch=name,
            tick=ready.watch,
        ).run()
        description = ready.description
    summary = load_report.summarize(done, p99=chosen.p99, limit=chosen.goodput_limit)
    report.write(out / "load.json", {"service": description, **about, **summary})
    click.echo(load_report.table(summary))
    if earlier is not None:
        click.echo("\n" + load_report.compare(earlier, summary))
    plots.draw(load_report.plot, summary, out / "load.png")
    return summary["passed"] is not False


def service_for(
    chosen: LoadOptions, model: str, dtype: str, threads: int
) -> AbstractContextManager[Service]:
    if chosen.redis_url is not None:
        return running_service(chosen.redis_url, chosen.queue)
    arguments: list[str] = []
    for item in chosen.worker_options:
        option, separator, value = item.removeprefix("--").partition("=")
        arguments += [f"--{option}", *([value] if separator else [])]
    return private_service(model, dtype=dtype, threads=threads, arguments=tuple(arguments))


def _short(requests: Requests, count: int) -> Requests:
    """The last ones with short answers: they warm the kernels and leave the first prompts new."""
    return [{**fields, "max_tokens": 2} for fields in requests[-count:]]


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not {"load", "samples", "latency"} <= found.keys():
            raise ValueError("it has no load, latency and samples")
    except ValueError as error:
        raise click.ClickException(f"{path} is no report of a load test: {error}") from error
    return found
