"""`headrace autoscale`: try out how a queue scales, without a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from headrace.worker.autoscale import plot as plotting
from headrace.worker.autoscale.behavior import Behavior
from headrace.worker.autoscale.compare import (
    POLICIES,
    Goals,
    compare,
    default_target,
    make_policy,
)
from headrace.worker.autoscale.controllers import (
    Controller,
    HpaController,
    KedaController,
    recommended_behavior,
)
from headrace.worker.autoscale.fleet import Machine
from headrace.worker.autoscale.hpa import SYNC_PERIOD_S, HpaSpec
from headrace.worker.autoscale.keda import Fallback, FallbackBehavior, ScaledObject
from headrace.worker.autoscale.outcome import Scenario
from headrace.worker.autoscale.policy import ScalingPolicy
from headrace.worker.autoscale.report import table, to_json
from headrace.worker.autoscale.service import ServiceRate
from headrace.worker.autoscale.shapes import SHAPES, Load, make
from headrace.worker.autoscale.trace import MOST_JOBS, Trace, read_bulk_file, read_trace
from headrace.worker.options import FiniteType

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(value: Any) -> float:
    """Seconds, or a number with s, m, h or d."""
    text = str(value).strip().lower()
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no duration: write 90, 90s, 15m, 2h or 1d"
        ) from None
    if not 0.0 <= seconds < float("inf"):
        raise click.BadParameter(f"{value!r} is no finite duration of 0 or more")
    return seconds


def target(value: Any) -> tuple[str, float]:
    """POLICY=NUMBER."""
    name, _, text = str(value).partition("=")
    if name not in POLICIES:
        raise click.BadParameter(f"{name!r} is none of {', '.join(POLICIES)}")
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise click.BadParameter(f"the target in {value!r} is no number above 0")
    return name, number


def outage(value: Any) -> tuple[float, float]:
    """START+LENGTH, both durations."""
    start, plus, length = str(value).partition("+")
    if not plus:
        raise click.BadParameter(f"{value!r}: write START+LENGTH, as in 2h+15m")
    return duration(start), duration(length)


_SHARE = FiniteType(0.0, 1.0)
_POSITIVE = FiniteType(0.0, above=True)
_NUMBER = FiniteType(0.0)
_MOST_REPLICAS = 10_000
_MOST_TURNS = 10_000_000


@click.group(context_settings={"auto_envvar_prefix": "HEADRACE_AUTOSCALE"})
def autoscale() -> None:
    """Choose what a queue scales on, and its target."""


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


_option = click.option

_path = click.Path(path_type=Path)
_REPLICAS = click.IntRange(1, _MOST_REPLICAS)
_trace_options = _options(
    _option(
        "--trace",
        type=_path,
        help="CSV or JSONL: arrival, prompt_tokens, output_tokens; deadline_s, count if you like.",
    ),
    _option("--bulk-file", type=_path, help="A file of batch requests, submitted at 0."),
    _option("--shape", type=click.Choice(list(SHAPES)), default="daily", help="Made-up arrivals."),
    _option("--jobs", type=click.IntRange(1, MOST_JOBS), default=100_000, help="Of a shape."),
    _option("--duration", type=duration, default="24h", help="Of a shape."),
    _option("--prompt-tokens", type=_POSITIVE, default=1500, help="Of a shape's mean job."),
    _option("--output-tokens", type=_POSITIVE, default=500, help="Of a shape's mean job."),
    _option("--spread", type=_NUMBER, default=1.0, help="Of lengths: deviation over mean."),
    _option("--deadline", type=duration, help="After arrival; for shapes and bulk files."),
)
_machine_options = _options(
    _option("--prefill-rate", type=_POSITIVE, default=4000, help="Prompt tokens/s of a worker."),
    _option("--decode-rate", type=_POSITIVE, default=600, help="Output tokens/s, full batch."),
    _option("--stream-rate", type=_POSITIVE, help="Output tokens/s of one sequence alone."),
    _option("--slots", type=click.IntRange(1), default=32, help="Jobs at once in a worker."),
    _option("--cold-start", type=duration, default="3m", help="From order to first claim."),
    _option("--cold-start-jitter", type=_SHARE, default=0.0, help="Evenly +- this part of it."),
    _option("--drain", type=duration, default="120s", help="For a worker told to stop."),
    _option("--checkpoint/--no-checkpoint", default=True, help="Keep tokens of stopped jobs."),
    _option(
        "--deletion-cost/--no-deletion-cost", default=True, help="The least busy pod goes first."
    ),
    _option("--gpus", type=click.IntRange(1), default=1, help="Of a worker."),
    _option("--on-demand-price", type=_NUMBER, default=4.0, help="Of a worker hour."),
    _option("--spot-price", type=_NUMBER, default=1.6, help="Of a worker hour."),
    _option("--spot-share", type=_SHARE, default=0.0, help="Of the workers above the base."),
    _option("--on-demand-base", type=click.IntRange(0), default=0, help="Workers never on spot."),
    _option("--spot-interruptions", type=_NUMBER, default=0.05, help="Per spot worker and hour."),
    _option("--spot-notice", type=duration, default="25s", help="Work goes on for so long."),
)
_scaling_options = _options(
    _option("--controller", type=click.Choice(["keda", "hpa"]), default="keda", help="Who scales."),
    _option("--policy", type=click.Choice(POLICIES), multiple=True, help="Default: all."),
    _option("--target", "targets", type=target, multiple=True, help="As in outstanding=50."),
    _option(
        "--search",
        type=click.IntRange(0, 20),
        default=3,
        help="While no policy holds the goals, halve all targets, so many times at most.",
    ),
    _option(
        "--acceptable-wait",
        type=duration,
        default="5m",
        help="Goal for the p95 of jobs without a deadline; default targets follow from it.",
    ),
    _option("--allow-missed", type=_NUMBER, default=0.1, help="Percent of deadlines."),
    _option("--min-replicas", type=click.IntRange(0), default=0, help="Kept even when idle."),
    _option("--max-replicas", type=_REPLICAS, default=20, help="Never exceeded."),
    _option("--initial-replicas", type=click.IntRange(0), default=0, help="Ordered at 0."),
    _option(
        "--behavior",
        type=click.Choice(["recommended", "kubernetes", "none"]),
        default="recommended",
        help="The HPA's behavior: Headrace's chart, Kubernetes' defaults, or not set.",
    ),
    _option("--polling", type=duration, default="15s", help="KEDA's pollingInterval."),
    _option("--cooldown", type=duration, help="KEDA's; default: 5m or twice the cold start."),
    _option("--activation", type=_NUMBER, default=0.0, help="KEDA's activation threshold."),
    _option("--ignore-null/--no-ignore-null", default=False, help="KEDA's ignoreNullValues."),
    _option("--fallback-replicas", type=click.IntRange(0), help="KEDA's fallback."),
    _option("--fallback-threshold", type=click.IntRange(0), default=3, help="Failures before it."),
    _option(
        "--fallback-behavior",
        type=click.Choice([b.value for b in FallbackBehavior if b.value != "scalingModifiers"]),
        default=FallbackBehavior.CURRENT_REPLICAS_IF_HIGHER.value,
        help="What the fallback does with the current count.",
    ),
    _option("--outage", "outages", type=outage, multiple=True, help="Exporter away: START+LENGTH."),
    _option(
        "--order",
        type=click.Choice(["deadline", "fifo"]),
        default="deadline",
        help="What is claimed first.",
    ),
    _option("--expire-late/--no-expire-late", default=False, help="Drop jobs claimed too late."),
    _option("--scrape", type=duration, default="15s", help="Interval of reading the exporter."),
    _option("--sync-jitter", type=duration, default="0s", help="Controllers late by up to this."),
    _option("--run-on", type=duration, help="After the last job. Default: enough for deadlines."),
    _option("--seed", type=int, default=0, help="Same seed, same result."),
)
_output_options = _options(
    _option("--json", "as_json", is_flag=True, help="One JSON object instead of the table."),
    _option("--samples", is_flag=True, help="With --json: the state at every scrape."),
    _option("--plot", type=_path, help="Write a PNG."),
)


_SECTIONS = {
    "trace": "Arrivals",
    "prefill_rate": "A worker",
    "gpus": "Prices and spot",
    "controller": "Policies, goals and limits",
    "polling": "KEDA",
    "order": "The simulation",
    "as_json": "Output",
}
"""By the first option of each, in the order above."""


class _Sectioned(click.Command):
    """Sixty options are read by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = _SECTIONS.get(parameter.name or "", title)
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


@autoscale.command("simulate", cls=_Sectioned, context_settings={"show_default": True})
@_trace_options
@_machine_options
@_scaling_options
@_output_options
def simulate_command(**options: Any) -> None:
    """Simulate a queue and its scaling; compare policies and targets; recommend one.

    \b
    headrace autoscale simulate --shape burst --jobs 5000 --plot burst.png
    headrace autoscale simulate --trace arrivals.csv --decode-rate 900 --deadline 2h

    What workers measured, the exporter shows: headrace_queue_service_tokens_per_second and
    headrace_queue_cold_start_seconds. Durations: 90, 90s, 15m, 2h, 1d.

    Every flag has a variable, as HEADRACE_AUTOSCALE_SIMULATE_COLD_START for --cold-start.
    """
    try:
        scenario = _scenario(options)
        policies = _policies(options, scenario)
        comparison = compare(
            scenario,
            policies,
            lambda policy: _controller(options, scenario, policy),
            Goals(scenario.acceptable_wait_s, options["allow_missed"]),
            search=0 if options["targets"] else options["search"],
            watched=_shown,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OverflowError as error:
        raise click.UsageError(f"a length, rate or time is too large ({error})") from error
    except OSError as error:
        raise click.UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    if options["as_json"]:
        click.echo(to_json(comparison, samples=options["samples"]), nl=False)
    else:
        click.echo(table(comparison))
    if options["plot"] is not None:
        try:
            plotting.plot(comparison, options["plot"])
        except plotting.PlotUnavailable as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(f"cannot write {options['plot']}: {error}") from error
        click.echo(f"plot: {options['plot']}", err=True)


@contextmanager
def _shown(scenario: Scenario, policy: ScalingPolicy) -> Iterator[Callable[[float], object]]:
    """On a terminal, how far a simulation is that takes more than a moment."""
    days = scenario.trace.end_s / 86400.0
    with tqdm(
        total=round(days, 2), desc=policy.name, unit="day", delay=2.0, disable=None, leave=False
    ) as bar:
        yield lambda now: bar.update(min(now / 86400.0, days) - bar.n)


def _trace(o: dict[str, Any]) -> Trace:
    if o["trace"] is not None and o["bulk_file"] is not None:
        raise ValueError("--trace and --bulk-file: give one of them")
    if o["trace"] is not None:
        return read_trace(o["trace"])
    if o["bulk_file"] is not None:
        return read_bulk_file(
            o["bulk_file"], output_tokens=round(o["output_tokens"]), deadline_s=o["deadline"]
        )
    load = Load(
        o["jobs"],
        o["duration"],
        o["prompt_tokens"],
        o["output_tokens"],
        o["spread"],
        o["deadline"],
        o["seed"],
    )
    return make(o["shape"], load)


def _scenario(o: dict[str, Any]) -> Scenario:
    rate = ServiceRate(o["prefill_rate"], o["decode_rate"], o["slots"], o["stream_rate"])
    machine = Machine(
        rate,
        cold_start_s=o["cold_start"],
        cold_start_jitter=o["cold_start_jitter"],
        drain_s=o["drain"],
        checkpoint=o["checkpoint"],
        deletion_cost=o["deletion_cost"],
        gpus=o["gpus"],
        on_demand_price=o["on_demand_price"],
        spot_price=o["spot_price"],
        spot_share=o["spot_share"],
        on_demand_base=o["on_demand_base"],
        spot_notice_s=o["spot_notice"],
        spot_interruptions_per_hour=o["spot_interruptions"],
    )
    for flag in ("scrape", "polling", "acceptable_wait"):
        if o[flag] <= 0.0:
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0")
    if o["min_replicas"] > o["max_replicas"]:
        raise ValueError(
            f"--min-replicas {o['min_replicas']} is above --max-replicas {o['max_replicas']}"
        )
    if o["initial_replicas"] > o["max_replicas"]:
        raise ValueError(
            f"--initial-replicas {o['initial_replicas']} is above --max-replicas"
            f" {o['max_replicas']}"
        )
    trace = _trace(o)
    run_on = o["run_on"]
    if run_on is None:
        patience = [d - a for a, d in zip(trace.arrival, trace.deadline, strict=True) if d != inf]
        run_on = max(21600.0, 2.0 * o["acceptable_wait"], 2.0 * max(patience, default=0.0))
    periods = (o["scrape"], o["polling"], SYNC_PERIOD_S)
    turns = (trace.end_s + run_on) * sum(1.0 / period for period in periods)
    if turns > _MOST_TURNS:
        raise ValueError(
            f"{(trace.end_s + run_on) / 86400.0:.3g} days with the exporter read every"
            f" {o['scrape']:g} s are {turns:.2g} turns to simulate; at most {_MOST_TURNS:,} are."
            " Give a shorter --duration or --run-on, or a longer --scrape and --polling"
        )
    return Scenario(
        trace,
        machine,
        min_replicas=o["min_replicas"],
        max_replicas=o["max_replicas"],
        # An HPA never leaves a zero that is below its minimum.
        initial_replicas=max(o["min_replicas"], o["initial_replicas"]),
        acceptable_wait_s=o["acceptable_wait"],
        scrape_s=o["scrape"],
        sync_jitter_s=o["sync_jitter"],
        deadline_order=o["order"] == "deadline",
        expire_late=o["expire_late"],
        outages=o["outages"],
        run_on_s=run_on,
        seed=o["seed"],
    )


def _policies(o: dict[str, Any], scenario: Scenario) -> list[ScalingPolicy]:
    """Every policy asked for, with each of its targets."""
    policies = []
    asked = o["policy"] or POLICIES
    for name, _ in o["targets"]:
        if name not in asked:
            raise ValueError(f"--target {name}=... but --policy leaves {name} out")
    for name in asked:
        given = [number for of, number in o["targets"] if of == name]
        for number in given or [default_target(name, scenario)]:
            policies.append(make_policy(name, number, scenario))
    return policies


def _controller(o: dict[str, Any], scenario: Scenario, policy: ScalingPolicy) -> Controller:
    behavior: Behavior | None = {
        "recommended": recommended_behavior(scenario.machine.cold_start_s),
        "kubernetes": Behavior(),
        "none": None,
    }[o["behavior"]]
    if o["controller"] == "hpa":
        spec = HpaSpec(scenario.max_replicas, scenario.min_replicas, behavior)
        return HpaController(spec, policy.target)
    fallback = None
    if o["fallback_replicas"] is not None:
        kind = FallbackBehavior(o["fallback_behavior"])
        fallback = Fallback(o["fallback_threshold"], o["fallback_replicas"], kind)
    cooldown = o["cooldown"]
    if cooldown is None:
        cooldown = max(300.0, 2.0 * scenario.machine.cold_start_s)
    return KedaController(
        ScaledObject(
            max_replica_count=scenario.max_replicas,
            min_replica_count=scenario.min_replicas,
            polling_interval_s=o["polling"],
            cooldown_period_s=cooldown,
            threshold=policy.target,
            activation_threshold=o["activation"],
            fallback=fallback,
        ),
        behavior=behavior,
        ignore_null=o["ignore_null"],
    )
