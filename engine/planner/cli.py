"""`headrace plan`: what fits on which card, how long the job takes and what it costs."""

import json
import math
from pathlib import Path

import click

from headrace.engine.planner import catalog, report
from headrace.engine.planner.calibration import default_path, read_measurement
from headrace.engine.planner.candidates import (
    DEFAULT_COUNTS,
    SIXTEEN_BIT,
    Candidate,
    Options,
    candidates,
)
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import CARDS, DEFAULT_CARDS, Card, find_card
from headrace.engine.planner.job import INTERRUPTIONS_PER_HOUR, Job
from headrace.engine.planner.kv import KV_TYPES, parse_kv_type
from headrace.engine.planner.memory import Settings
from headrace.engine.planner.prices import price_table
from headrace.engine.planner.recommend import (
    Market,
    Recommendation,
    assumptions,
    compare,
    recommend,
    smaller_model,
)
from headrace.engine.planner.resolve import resolve
from headrace.engine.planner.roofline import Efficiency
from headrace.engine.planner.schemes import EXAMPLES
from headrace.engine.planner.units import parse_duration, parse_size


def _print_known(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    click.echo("Models:\n  " + "\n  ".join(catalog.names()))
    click.echo("\nCards:")
    for card in CARDS:
        limits = f" ({'; '.join(card.limits)})" if card.limits else ""
        click.echo(
            f"  {card.name:10} {card.memory / 2**30:6.1f} GiB {card.bandwidth / 1e9:6.0f} GB/s "
            f"{card.flops[card.float_dtype] / 1e12:6.0f} TFLOP/s {card.float_dtype}{limits}"
        )
    click.echo("  cpu        this machine")
    click.echo(f"\nSchemes:\n  {', '.join(EXAMPLES)}")
    context.exit()


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_PLAN"})
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--gpu", default=",".join(DEFAULT_CARDS), show_default=True, metavar="CARD,...")
@click.option(
    "--count",
    default=",".join(map(str, DEFAULT_COUNTS)),
    show_default=True,
    metavar="N,...",
    help="Numbers of cards to compare.",
)
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    metavar="NAME,...",
    help=f"Weight schemes; default {SIXTEEN_BIT}, int8, int8-dynamic and int4-g128, or the "
    "checkpoint's own. All: --list.",
)
@click.option("--requests", default=10000, show_default=True, help="Requests of the whole job.")
@click.option("--prompt", default=1024, show_default=True, help="Prompt tokens of a request.")
@click.option("--output", default=256, show_default=True, help="Output tokens of a request.")
@click.option("--shared-prefix", default=0, help="Prompt tokens that all requests share.")
@click.option("--concurrency", type=int, help="Requests to run at once; default: as many as fit.")
@click.option("--deadline", metavar="TIME", help="Time the job may take: 90m, 2h, 1h30m.")
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="CARD=USD[/SPOT],...",
    help="Dollars an hour of one card, on demand and on spot; a bare number for a single --gpu.",
)
@click.option(
    "--market", type=click.Choice(["any", "on-demand", "spot"]), default="any", show_default=True
)
@click.option(
    "--interruptions",
    type=click.FloatRange(min=0),
    default=INTERRUPTIONS_PER_HOUR,
    show_default=True,
    help="Expected losses of a spot machine an hour.",
)
@click.option(
    "--kv-dtype", default="16-bit", show_default=True, metavar="|".join(dict.fromkeys(KV_TYPES))
)
@click.option("--tensor-parallel", type=click.IntRange(min=1), help="Force a split over N cards.")
@click.option("--max-num-seqs", type=click.IntRange(1, 2**16), default=256, show_default=True)
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1, 2**20), default=2048, show_default=True
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0.1, 1.0),
    default=0.9,
    show_default=True,
    help="Share of the card's memory that is used.",
)
@click.option(
    "--kv-cache-memory", metavar="SIZE", help="Limit of the KV cache on each card: 8GiB, 512M."
)
@click.option(
    "--measurement",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="File of `headrace bench` that calibrates a card; the machine's own is found by itself.",
)
@click.option("--all", "show_all", is_flag=True, help="Print every count, not the best of each.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, one row a candidate.")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_known,
    help="Print known models, cards and schemes.",
)
@click.pass_context
def plan(
    context: click.Context,
    models: tuple[str, ...],
    gpu: str,
    count: str,
    schemes: tuple[str, ...],
    requests: int,
    prompt: int,
    output: int,
    shared_prefix: int,
    concurrency: int | None,
    deadline: str | None,
    prices: tuple[str, ...],
    market: Market,
    interruptions: float,
    kv_dtype: str,
    tensor_parallel: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
    kv_cache_memory: str | None,
    measurement: tuple[Path, ...],
    show_all: bool,
    as_json: bool,
) -> None:
    """Plan a job: sizes, speed and cost of MODEL on each card, and a recommendation.

    MODEL is a folder, a config.json, a .gguf file, a public name (Qwen2-7B) or a size (7B).
    Several are compared. Exit code 1: nothing fits or no card meets the deadline; 2: bad input.
    """
    try:
        for flag, number in (
            ("--interruptions", interruptions),
            ("--gpu-memory-utilization", gpu_memory_utilization),
        ):
            if not math.isfinite(number):
                raise PlanError(f"{flag} {number} is no such number")
        cards = _cards(gpu)
        options = Options(
            job=Job(
                requests=requests,
                prompt=prompt,
                output=output,
                shared_prefix=shared_prefix,
                concurrency=concurrency,
                deadline=parse_duration(deadline) if deadline else None,
            ),
            settings=Settings(
                kv_type=parse_kv_type(kv_dtype),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                memory_utilization=gpu_memory_utilization,
                kv_cache_memory=parse_size(kv_cache_memory) if kv_cache_memory else None,
            ),
            cards=cards,
            prices=price_table(prices, only=cards[0].name if len(cards) == 1 else None),
            schemes=[s for text in schemes for s in text.split(",") if s.strip()],
            counts=_counts(count),
            tensor_parallel=tensor_parallel,
            efficiencies=_efficiencies(measurement),
            interruptions_per_hour=interruptions,
        )
        met = _plan(models, options, market, show_all=show_all, as_json=as_json)
    except PlanError as error:
        click.echo(f"Error: {error}", err=True)
        context.exit(2)
    if not met:
        context.exit(1)


def _cards(text: str) -> list[Card]:
    cards = [find_card(name) for name in text.split(",") if name.strip()]
    if not cards:
        raise PlanError("--gpu names no card")
    return list({card.name: card for card in cards}.values())


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(n) for n in text.split(",") if n.strip()})
    except ValueError:
        raise PlanError(f"--count {text!r} is no list of numbers such as 1,2,4") from None
    if not counts or counts[0] < 1 or counts[-1] > 1024:
        raise PlanError(f"--count {text!r} must be between 1 and 1024")
    return counts


def _efficiencies(files: tuple[Path, ...]) -> dict[str, Efficiency]:
    """Measurements by card; those named on the command line replace the machine's own."""
    own = default_path()
    paths = [own] if own.is_file() else []
    return {card.name: fitted for card, fitted in map(read_measurement, [*paths, *files])}


def _plan(
    names: tuple[str, ...], options: Options, market: Market, *, show_all: bool, as_json: bool
) -> bool:
    """Whether every model has a candidate that fits and meets the deadline."""
    models = [resolve(name) for name in names]
    rows: list[Candidate] = []
    found: list[Recommendation] = []
    for model in models:
        own = candidates(model, options)
        rows.extend(own)
        found.append(recommend(model, own, options, market))
    if as_json:
        _print_json(rows, found, options)
    else:
        for model in models:
            click.echo(f"{model.shape.name}: {model.shape.describe()}")
            for note in model.shape.notes:
                click.echo(f"  note: {note}")
        shown = rows if show_all else report.short_list(rows, found)
        click.echo("\n" + report.table(shown, found) + "\n")
        for model, recommendation in zip(models, found, strict=True):
            _print_recommendation(recommendation)
            if len(models) == 1:
                sibling = smaller_model(model, recommendation, options, market)
                if sibling:
                    click.echo(f"  - Big on several cards or small on one: {sibling}")
        if len(models) > 1:
            click.echo(f"Compared: {compare(found)}")
        for line in assumptions(options):
            click.echo(line)
    return all(r.choice is not None and r.choice.meets_deadline for r in found)


def _print_recommendation(found: Recommendation) -> None:
    if found.choice is None:
        click.echo(f"{found.model}: no recommendation")
    else:
        c = found.choice
        click.echo(f"{found.model}: {c.count} x {c.gpu} in {c.scheme}, {found.market}")
    for reason in found.reasons:
        click.echo(f"  - {reason}")


def _print_json(rows: list[Candidate], found: list[Recommendation], options: Options) -> None:
    picks = {r.choice.key: r for r in found if r.choice}
    basis = {card.name: options.efficiency(card).basis for card in options.cards}
    out = []
    for row in rows:
        chosen = picks.get(row.key)
        item = report.row_json(row, chosen is not None, basis[row.gpu])
        if chosen is not None:
            item["market"] = chosen.market
            item["reason"] = f"{row.reason}; {chosen.rule}"
        out.append(item)
    click.echo(json.dumps(out, indent=1))
