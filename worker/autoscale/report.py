"""A comparison as a table for people and as JSON for scripts. `plot` draws it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from headrace.worker.autoscale.compare import Comparison, Result, mean_work_s
from headrace.worker.autoscale.outcome import percentile

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Column:
    """`rare`: left out where no policy has anything in it."""

    title: str
    cell: Callable[[Result], str]
    rare: bool = False


_COLUMNS = (
    _Column("wait p50", lambda r: duration(percentile(r.sorted_waits, 50.0))),
    _Column("p95", lambda r: duration(percentile(r.sorted_waits, 95.0))),
    _Column("max", lambda r: duration(percentile(r.sorted_waits, 100.0))),
    _Column("result p95", lambda r: duration(percentile(r.sorted_latencies, 95.0))),
    _Column("late", lambda r: str(r.outcome.missed), rare=True),
    _Column("unfinished", lambda r: str(r.outcome.unfinished), rare=True),
    _Column("GPU h", lambda r: f"{r.gpu_hours:.1f}"),
    _Column("cost", lambda r: f"{r.cost:.2f}"),
    _Column("used", lambda r: f"{100.0 * r.outcome.utilization:.0f} %"),
    _Column("peak", lambda r: str(r.outcome.peak_replicas)),
    _Column("starts", lambda r: str(r.outcome.cold_starts)),
    _Column("busy stopped", lambda r: str(r.outcome.busy_removals)),
    _Column("spot lost", lambda r: str(r.outcome.interruptions), rare=True),
    _Column("put back", lambda r: str(r.outcome.requeued)),
    _Column("redone", lambda r: duration(r.outcome.lost_work_s)),
)
_NOTHING = {"0"}


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 45 s, 12 min, 3.4 h."""
    if not math.isfinite(seconds):
        return "never"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    if seconds < 7200.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"


def table(comparison: Comparison) -> str:
    """The scenario in a line or two, one row a policy, the recommendation and its reason."""
    lines = [*_head(comparison), "", *_grid(comparison.results)]
    lines.append("")
    for result in comparison.results:
        if result.failures:
            lines.append(f"{result.label} fails: {'; '.join(result.failures)}.")
        elif result.policy.caveat:
            lines.append(f"{result.label} is for comparison only: it {result.policy.caveat}.")
    best = comparison.recommendation
    verb = "Recommended" if best.meets_goals else "Nothing to recommend"
    lines.append(f"{verb}: {best.result.label} ({best.result.policy.unit}).")
    lines.append(f"Why: {best.reason}.")
    return "\n".join(lines)


def _head(comparison: Comparison) -> list[str]:
    scenario = comparison.scenario
    trace, machine = scenario.trace, scenario.machine
    work_h = mean_work_s(scenario) * len(trace) / 3600.0
    return [
        f"{trace.name}: {len(trace)} jobs in {duration(trace.end_s)}, "
        f"{sum(trace.prompt_tokens)} prompt and {sum(trace.output_tokens)} output tokens, "
        f"{work_h:.3g} worker hours of work",
        f"workers: {machine.rate.slots} slots, cold start {duration(machine.cold_start_s)}, "
        f"{scenario.min_replicas} to {scenario.max_replicas} replicas; "
        f"acceptable wait {duration(comparison.goals.p95_wait_s)}",
    ]


def _grid(results: Sequence[Result]) -> list[str]:
    columns = [["policy @ target", *(result.label for result in results)]]
    for column in _COLUMNS:
        cells = [column.cell(result) for result in results]
        if not (column.rare and set(cells) <= _NOTHING):
            columns.append([column.title, *cells])
    widths = [max(map(len, cells)) for cells in columns]
    lines = []
    for row in zip(*columns, strict=True):
        first, *others = row
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return lines


def to_json(comparison: Comparison, *, samples: bool = False) -> bytes:
    """One JSON object. `samples`: also the state of queue and replicas at every scrape."""
    best = comparison.recommendation
    scenario = comparison.scenario
    return orjson.dumps(
        {
            "version": SCHEMA_VERSION,
            "scenario": {
                "trace": scenario.trace.name,
                "jobs": len(scenario.trace),
                "duration_s": scenario.trace.end_s,
                "mean_job_work_s": mean_work_s(scenario),
                "acceptable_wait_s": scenario.acceptable_wait_s,
                "cold_start_s": scenario.machine.cold_start_s,
                "min_replicas": scenario.min_replicas,
                "max_replicas": scenario.max_replicas,
                "seed": scenario.seed,
            },
            "results": [_fields(result, samples) for result in comparison.results],
            "recommended": {
                "policy": best.result.policy.name,
                "target": best.result.policy.target,
                "unit": best.result.policy.unit,
                "meets_goals": best.meets_goals,
                "reason": best.reason,
            },
        },
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )


def _fields(result: Result, samples: bool) -> dict[str, object]:
    out = result.outcome
    fields: dict[str, object] = {
        "policy": result.policy.name,
        "target": result.policy.target,
        "unit": result.policy.unit,
        "failures": result.failures,
        "caveat": result.policy.caveat or None,
        "wait_s": _percentiles(result.sorted_waits),
        "latency_s": _percentiles(result.sorted_latencies),
        "finished": out.finished,
        "unfinished": out.unfinished,
        "expired": out.expired,
        "with_deadline": out.with_deadline,
        "missed": out.missed,
        "gpu_hours": result.gpu_hours,
        "cost": result.cost,
        "on_demand_hours": out.on_demand_s / 3600.0,
        "spot_hours": out.spot_s / 3600.0,
        "replica_hours": out.replica_s / 3600.0,
        "utilization": out.utilization,
        "peak_replicas": out.peak_replicas,
        "cold_starts": out.cold_starts,
        "busy_removals": out.busy_removals,
        "spot_interruptions": out.interruptions,
        "requeued": out.requeued,
        "resumed_tokens": out.resumed_tokens,
        "lost_work_s": out.lost_work_s,
        "end_s": out.end_s,
    }
    if samples:
        fields["samples"] = [
            {
                "at_s": s.at,
                "pending": s.pending,
                "running": s.running,
                "replicas": s.replicas,
                "ready": s.ready,
                "metric": s.metric,
            }
            for s in out.samples
        ]
    return fields


def _percentiles(ascending: Sequence[float]) -> dict[str, float]:
    return {f"p{p:g}": percentile(ascending, p) for p in (50.0, 90.0, 95.0, 99.0, 100.0)}
